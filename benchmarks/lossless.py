"""Greedy decoding with a drafter beside plain greedy decoding in fp32, token by token: nothing may differ.

For every checkpoint, named as ``families.py`` names its runs: chain and tree, one request at a time and eight side by
side, on held-out prompts. What is drafted at once has a tree made from measured accuracies, as in ``families.py``; the
others have a dynamic one.

    python benchmarks/lossless.py build/families/tiny/*-1000
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import print_table, write_result
from families import MEASURED
from specdraft.data.prompts import encode
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import load_prompts
from specdraft.evaluation.speedup.rank_accuracy import measured_tree
from specdraft.targets import Target

SIDE_BY_SIDE = 32  # plain answers
COLUMNS = ("drafter", "draft", "batch", "tokens", "differing", "acceptance length")


def compare(
    target: Target, drafter: Any, shape: Shape, batch_size: int, prompts: list[list[int]], expected: list[list[int]]
) -> dict[str, Any]:
    """Decode all prompts; a token differs if it is not the plain decoder's at its place."""
    decoder = Decoder(target, drafter, shape)
    counts, differing, tokens = AcceptanceCounts(shape.depth), 0, 0
    length = max(map(len, expected))
    stream = decoder.stream(prompts, length, batch_size=batch_size)
    for number, generation in tqdm(stream, f"{shape}, batch {batch_size}", total=len(prompts), unit="prompt"):
        counts.add(generation)
        ours, plain = generation.tokens, expected[number]
        tokens += len(plain)
        differing += sum(a != b for a, b in zip(ours, plain, strict=False)) + abs(len(ours) - len(plain))
    return {
        "shape": str(shape),
        "batch_size": batch_size,
        "tokens": tokens,
        "differing": differing,
        "acceptance_length": counts.acceptance_length,
    }


@exit_on_user_error
def main() -> None:
    """Parse options, decode, write; exit status 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path, help="run directories or drafters")
    parser.add_argument("--tokens", type=int, default=20_000, help="plain tokens to compare with (default 20000)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="requests side by side (1 and 8)")
    options = parser.parse_args()

    targets: dict[str, Target] = {}
    answers: dict[str, tuple[list[list[int]], list[list[int]]]] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    for checkpoint in options.checkpoints:
        drafter, config = load_drafter(checkpoint)
        name = config["target"]["name"]
        if name not in targets:
            targets[name] = Target.load(name, dtype="float32")
            answers[name] = plain_answers(targets[name], options.tokens, options.max_new_tokens)
        check_target(config, targets[name])
        results[checkpoint.name] = [
            compare(targets[name], drafter, shape, batch_size, *answers[name])
            for shape in (StaticTree.chain(5), tree(checkpoint.name.rsplit("-", 1)[0], drafter, targets[name]))
            for batch_size in options.batch_sizes
        ]
    rows = [
        [name, row["shape"], str(row["batch_size"]), f"{row['tokens']:,}", str(row["differing"]),
         f"{row['acceptance_length']:.2f}"]
        for name, family in results.items()
        for row in family
    ]  # fmt: skip
    print_table(COLUMNS, rows)
    settings = {"tokens": options.tokens, "max_new_tokens": options.max_new_tokens}
    print(f"\nwritten to {write_result('lossless', settings, {'checkpoints': results})}")
    if any(row["differing"] for family in results.values() for row in family):
        raise SystemExit(1)


def tree(family: str, drafter: Drafter, target: Target) -> Shape:
    """Of 16 nodes and depth 5."""
    if family in MEASURED:
        return measured_tree(drafter, target, num_nodes=16, depth=5, top_k=4)
    return DynamicTree(5, 4, 16)


def plain_answers(target: Target, tokens: int, max_new_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Held-out prompts and their plain greedy answers, at least ``tokens`` tokens in all."""
    found = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts("python-stdlib", 10_000)]
    prompts = [ids for ids in found if len(ids) + max_new_tokens <= target.max_length]
    answers: dict[int, list[int]] = {}
    with tqdm(total=tokens, desc="plain decoding", unit="token") as bar:
        for number, generation in Decoder(target).stream(prompts, max_new_tokens, batch_size=SIDE_BY_SIDE):
            answers[number] = generation.tokens
            bar.update(len(generation.tokens))
            if bar.n >= tokens:
                break
    return [prompts[number] for number in answers], list(answers.values())


if __name__ == "__main__":
    main()
