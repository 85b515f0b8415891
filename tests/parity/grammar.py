"""``make parity-grammar``: answers that follow a grammar, in the real vLLM and in our decoder.

Both walk it with llguidance. The same tokens, with drafts and without, and the same counts where drafts are made
without the grammar, as vLLM makes them: it cuts them where they break it. Exits with 1 if anything differs."""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import sys

import torch
from comparison import decode, differences, table
from engine import MAX_NEW_TOKENS, Engine, add_arguments, held_out_prompts
from short import trained

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.grammar import Grammar
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.errors import exit_on_user_error
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target

SCHEMA = """{"type": "object", "required": ["name", "arguments", "pure"], "additionalProperties": false, "properties": {
  "name": {"type": "string", "maxLength": 24}, "pure": {"type": "boolean"},
  "arguments": {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 16}}}}"""
GRAMMARS = {"schema": (".json", SCHEMA), "regex": (".regex", r"    return (self\.)?[a-z_]+(\([a-z_, ]*\))?\n")}
LEAST_ACCEPTANCE_LENGTH = 1.05  # above which equality says something


@exit_on_user_error
def main() -> None:
    """Train, export, decode on both sides, compare, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--head", help="a checkpoint or run directory; without it a short EAGLE-3 head is trained, once"
    )
    add_arguments(parser, "parity")
    options = parser.parse_args()
    engine, k = Engine.of(options), options.num_draft_tokens
    torch.set_num_threads(1)
    checkpoint = find(options.head) if options.head else trained("eagle3", engine.work)
    drafter, config = load_drafter(checkpoint)
    directory = export(checkpoint, VLLM(dtype="float32"), engine.work / "exported" / "grammar").resolve()
    target = Target.load(config["target"]["name"], dtype="float32", device="cpu")
    prompts = held_out_prompts(target, options.prompts, k)
    flags = VLLM.flags(drafter.family, str(directory), k)
    failed = False
    for name, (kind, text) in GRAMMARS.items():
        theirs = engine.answers(target, prompts, [{"name": name, "flags": flags}], grammar=(kind, text))
        file = engine.work / f"{name}{kind}"
        file.write_text(text)
        for masked in (False, True):
            sampling = Sampling(grammar=Grammar.of(str(file), masks_drafts=masked))
            ours = decode(Decoder(target, drafter, k, sampling), prompts, MAX_NEW_TOKENS)
            print(f"\n== {name}, drafts made {'under it' if masked else 'without it, as in vLLM'} ==")
            if masked:
                same = ours.tokens == theirs["plain"].tokens
                print(f"acceptance length {ours.acceptance_length:.4f}, {'equal' if same else 'DIFFERENT'} tokens")
                failed = failed or not same
                continue
            print(table(ours, theirs["plain"], theirs[name]))
            found = differences(ours, theirs["plain"], theirs[name], LEAST_ACCEPTANCE_LENGTH)
            print("\n".join(f"DIFFERENT: {line}" for line in found) if found else "equal: tokens and all counts")
            failed = failed or bool(found)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
