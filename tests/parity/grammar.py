"""``make parity-grammar``: answers that follow a grammar, in the real vLLM and in our decoder.

Both walk it with llguidance. The same tokens, with drafts and without, and the same counts where drafts are made
without the grammar, as vLLM makes them: it cuts them where they break it. Exits with 1 if anything differs."""

import specdraft.threads  # noqa: F401  # first of all

import sys

from comparison import decode, differences, table
from engine import MAX_NEW_TOKENS, held_out_prompts
from one_head import OneHead

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.grammar import Grammar
from specdraft.decoding.sampling import Sampling
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target

SCHEMA = """{"type": "object", "required": ["name", "arguments", "pure"], "additionalProperties": false, "properties": {
  "name": {"type": "string", "maxLength": 24}, "pure": {"type": "boolean"},
  "arguments": {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 16}}}}"""
GRAMMARS = {"schema": (".json", SCHEMA), "regex": (".regex", r"    return (self\.)?[a-z_]+(\([a-z_, ]*\))?\n")}
LEAST_ACCEPTANCE_LENGTH = 1.05  # above which equality says something


@exit_on_user_error
def main() -> None:
    """Train, export, decode on both sides, compare, and say so."""
    head = OneHead.of(__doc__)
    engine, k = head.engine, head.num_draft_tokens
    target = Target.load(head.target, dtype="float32", device="cpu")
    prompts = held_out_prompts(target, head.prompts, k)
    failed = False
    for name, (kind, text) in GRAMMARS.items():
        theirs = engine.answers(target, prompts, [{"name": name, "flags": head.flags()}], grammar=(kind, text))
        file = engine.work / f"{name}{kind}"
        file.write_text(text)
        for masked in (False, True):
            sampling = Sampling(grammar=Grammar.of(str(file), masks_drafts=masked))
            ours = decode(Decoder(target, head.drafter, k, sampling), prompts, MAX_NEW_TOKENS)
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
