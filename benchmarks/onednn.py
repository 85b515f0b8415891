"""What packing the weights for oneDNN gives on this CPU: products of a few rows, and the decoding passes of a target.

``python benchmarks/onednn.py``: plain and packed layers take turns, first alone, then as a whole: a pass over 1 to 8
tokens behind 200 cached ones, on the embedded target and on a random one of the shape of SmolLM2-135M. A pass over
K + 1 tokens verifies K drafted ones; what it costs in plain steps is what drafting has to earn back.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from common import alternate, median_ratio, print_table, write_result
from specdraft.decoding.passes import Pass
from specdraft.onednn import PackedLinear, pack
from specdraft.targets import Target

SHAPES = ((256, 768), (576, 1536), (576, 49_152), (2048, 8192))
TOKENS = (1, 2, 4, 6, 8)
HELD = 200


def smollm2() -> Target:
    """Random weights in the shape of SmolLM2-135M: the times are those of the trained ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return Target.from_model(LlamaForCausalLM(config), name="random weights in the shape of SmolLM2-135M")


def timed(call: Callable[[], Any], seconds: float) -> float:
    """Seconds a call, the median of calls that take ``seconds`` together."""
    call()
    spent: list[float] = []
    while sum(spent) < seconds or len(spent) < 5:
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def products(rounds: int) -> list[dict[str, Any]]:
    """Plain and packed products of a few rows."""
    measured = []
    for inputs, outputs in SHAPES:
        linear = nn.Linear(inputs, outputs, bias=False)
        layers = {"plain": linear, "packed": PackedLinear(linear)}
        for rows in (*TOKENS, 64, 512):
            given = torch.randn(rows, inputs)
            runs = {name: (lambda layer=layer: timed(lambda: layer(given), 0.05)) for name, layer in layers.items()}  # noqa: B023
            times = alternate(runs, rounds)
            gain = median_ratio(times["plain"], times["packed"])
            entry = {name: statistics.median(each) for name, each in times.items()}
            measured.append({"inputs": inputs, "outputs": outputs, "rows": rows, **entry, "speedup": gain})
    return measured


def passes(targets: dict[str, Target], rounds: int) -> list[dict[str, Any]]:
    """Passes over a few tokens behind ``HELD`` cached ones, with their logits."""

    def decoding(target: Target, tokens: int) -> Callable[[], float]:
        cache = target.new_cache(1, HELD + max(TOKENS))
        target.step(Pass.prompt(torch.randint(1000, (HELD,)).tolist(), target.device), cache)
        reading = Pass.text(torch.randint(1000, (1, tokens)), torch.tensor([HELD]), HELD, simple=True)

        def once() -> None:
            target.logits(target.step(reading, cache).last)

        return lambda: timed(once, 0.3)

    measured = []
    for tokens in TOKENS:
        times = alternate({name: decoding(target, tokens) for name, target in targets.items()}, rounds)
        entry = {name: statistics.median(each) for name, each in times.items()}
        measured.append({"tokens": tokens, **entry, "speedup": median_ratio(times["plain"], times["packed"])})
    for entry in measured:
        entry |= {f"{name}_in_plain_steps": entry[name] / measured[0][name] for name in targets}
    return measured


@torch.inference_mode()
def main() -> None:
    """Parse options, measure in turns, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    alone = products(arguments.rounds)
    header = ["product, us", "rows", "plain", "packed", "speedup"]
    rows = [
        [f"{each['inputs']} x {each['outputs']}", str(each["rows"])]
        + [f"{1e6 * each[name]:.0f}" for name in ("plain", "packed")]
        + [f"{each['speedup']:.2f}x"]
        for each in alone
    ]
    print_table(header, rows)
    whole = {}
    for load in (lambda: Target.load("embedded://tiny", device="cpu", packed=False), smollm2):
        plain, ours = load(), load()
        pack(ours.model)
        found = whole[plain.identity.name] = passes({"plain": plain, "packed": ours}, arguments.rounds)
        print()
        header = [f"{plain.identity.name}, ms", "plain", "packed", "speedup", "plain, in steps", "packed, in steps"]
        rows = [
            [f"{each['tokens']} tokens"]
            + [f"{1e3 * each[name]:.2f}" for name in ("plain", "packed")]
            + [f"{each[name]:.2f}x" for name in ("speedup", "plain_in_plain_steps", "packed_in_plain_steps")]
            for each in found
        ]
        print_table(header, rows)
    path = write_result("onednn", {**vars(arguments), "held": HELD}, {"products": alone, "passes": whole})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
