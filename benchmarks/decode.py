"""Greedy decoding side by side: our loop and transformers' ``generate``, plain, with a draft model, with prompt lookup.

``python benchmarks/decode.py --draft RUN --head RUN``: one process, one target, the same prompts; the contenders take
turns prompt by prompt. Tokens are ids, cut at the end of text by one function for all. Since every contender is greedy
and lossless, all must produce the same tokens; how many prompts do is reported.

The draft model (``train.py model=draft``) drafts in our loop and, exported, in transformers' assisted generation: there
once K tokens a round as we do, and once by its own default schedule. The head is any other drafter. With ``--compile``
our passes are compiled, and transformers' plain ones beside them as it compiles them on a GPU, with a static cache.
Compiling is not timed.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import CompileConfig

from common import median_ratio, print_table, write_result
from specdraft.data.prompts import check_lengths, encode, load_prompts
from specdraft.decoding.compilation import compiling
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import truncate
from specdraft.drafters.checkpoint import check_target, load_drafter, read_config
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError, exit_on_user_error
from specdraft.onednn import packed
from specdraft.targets import Target

Generate = Callable[[list[int]], list[int]]
COMPILED = "transformers, compiled"

PAIRS = {  # ours: theirs
    "plain": ("ours", "transformers"),
    "plain, both compiled": ("ours", COMPILED),
    "the same draft model, same K": ("ours, draft model", "transformers, draft model"),
    "the same draft model, its default schedule": ("ours, draft model", "transformers, draft model, default"),
    "our head, its draft model": ("ours, head", "transformers, draft model, default"),
    "prompt lookup": ("ours, prompt lookup", "transformers, prompt lookup"),
}


def ours(decoder: Decoder, limit: int) -> Generate:
    """Our loop."""
    return lambda prompt: decoder.generate(prompt, limit).tokens


def theirs(target: Target, limit: int, **options: Any) -> Generate:
    """Transformers' ``generate`` on the same weights, which it has not packed."""

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        output = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, **options
        )
        return output[0, len(prompt) :].tolist()

    return generate


def assisted(target: Target, assistant: Any, limit: int, num_draft_tokens: int | None) -> Generate:
    """With a draft model that drafts ``num_draft_tokens`` each round, or as transformers sees fit (None)."""
    generate = theirs(target, limit, assistant_model=assistant)
    default = assistant.generation_config.to_dict()
    fixed = {"num_assistant_tokens": num_draft_tokens, "num_assistant_tokens_schedule": "constant"}
    settings = default if num_draft_tokens is None else {**default, **fixed, "assistant_confidence_threshold": 0.0}

    def run(prompt: list[int]) -> list[int]:
        assistant.generation_config.update(**settings)  # generate itself changes them from call to call
        return generate(prompt)

    return run


def measure(
    contenders: dict[str, Generate], prompts: Sequence[list[int]], limit: int, eos: frozenset[int], rounds: int
) -> dict[str, Any]:
    """Tokens and seconds of every contender, summed over the prompts of a round."""
    outputs: dict[str, list[list[int]]] = {}
    for name, generate in contenders.items():  # not timed: the first call of each prepares things
        outputs[name] = [truncate(generate(prompt), limit, eos) for prompt in prompts]
    wall = {name: [0.0] * rounds for name in contenders}
    cpu = {name: [0.0] * rounds for name in contenders}
    for turn, prompt in itertools.product(range(rounds), prompts):
        for name, generate in contenders.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            generate(prompt)
            wall[name][turn] += time.perf_counter() - started
            cpu[name][turn] += time.process_time() - started_cpu
    expected = outputs["transformers"]
    return {
        name: {
            "tokens": sum(map(len, tokens)),
            "tokens_per_second": sum(map(len, tokens)) / statistics.median(wall[name]),
            "tokens_per_cpu_second": sum(map(len, tokens)) / statistics.median(cpu[name]),
            "identical_prompts": sum(a == b for a, b in zip(tokens, expected, strict=True)),
            "wall_seconds": wall[name],
            "cpu_seconds": cpu[name],
        }
        for name, tokens in outputs.items()
    }


@exit_on_user_error
def main() -> None:
    """Parse options, decode in turns, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, help="a run of model=draft, or its drafter/")
    parser.add_argument("--head", required=True, help="a run of another model, or its drafter/")
    parser.add_argument("--benchmark", default="python-stdlib", help="or a .jsonl file of prompts")
    parser.add_argument("--limit", type=int, default=12, help="prompts (default 12)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="K (default 5)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compiled passes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    head, config = load_drafter(arguments.head)
    draft, _ = load_drafter(arguments.draft)
    if not isinstance(draft, DraftModel):
        raise UserError(f"--draft {arguments.draft} holds a {type(draft).__name__}: expected a run of model=draft")
    target = Target.load(config["target"]["name"], config["target"]["revision"], dtype="float32")
    for path, drafter in ((arguments.head, head), (arguments.draft, draft)):
        check_target(read_config(path), target)
        drafter.to(target.device, target.dtype)
    k, limit = arguments.num_draft_tokens, arguments.max_new_tokens
    chosen = load_prompts(arguments.benchmark, arguments.limit)
    check_lengths(target.tokenizer, chosen, target.max_length, limit)
    prompts = [encode(target.tokenizer, prompt.opening) for prompt in chosen]
    assistant = draft.export_model()

    plain = Target.load(config["target"]["name"], config["target"]["revision"], dtype="float32", packed=False)

    contenders = {
        "ours": ours(Decoder(target), limit),
        "transformers": theirs(plain, limit),
        "ours, draft model": ours(Decoder(target, draft, k), limit),
        "transformers, draft model": assisted(plain, assistant, limit, k),
        "transformers, draft model, default": assisted(plain, assistant, limit, None),
        "ours, head": ours(Decoder(target, head, k), limit),
        "ours, prompt lookup": ours(Decoder(target, PromptLookup(), k), limit),
        "transformers, prompt lookup": theirs(plain, limit, prompt_lookup_num_tokens=k),
    }
    if arguments.compile:
        everywhere = CompileConfig()
        everywhere._compile_all_devices = True  # by itself it compiles on accelerators alone
        contenders[COMPILED] = theirs(plain, limit, cache_implementation="static", compile_config=everywhere)
    with packed(head), packed(draft), compiling(arguments.compile):
        measured = measure(contenders, prompts, limit, target.eos_token_ids, arguments.rounds)
    ratios = {
        what: median_ratio(measured[theirs_]["wall_seconds"], measured[ours_]["wall_seconds"])
        for what, (ours_, theirs_) in PAIRS.items()
        if theirs_ in measured
    }

    baseline = measured["ours"]["tokens_per_second"]
    rows = [
        [
            name,
            f"{m['tokens_per_second']:.1f}",
            f"{m['tokens_per_cpu_second']:.1f}",
            f"{m['tokens_per_second'] / baseline:.2f}x",
            f"{m['identical_prompts']}/{len(prompts)}",
        ]
        for name, m in measured.items()
    ]
    print_table(["", "tokens/s", "per CPU s", "against ours plain", "same tokens"], rows)
    print()
    print_table(["ours / transformers", "speed"], [[what, f"{ratio:.2f}x"] for what, ratio in ratios.items()])

    def count(model: Any) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    settings = {
        **{name: value for name, value in vars(arguments).items() if name not in ("head", "draft")},
        "target": config["target"],
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "head": type(head).__name__,
        "head_parameters": count(head),
        "draft_parameters": count(draft),
    }
    path = write_result("decode", settings, {"contenders": measured, "ratios": ratios})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
