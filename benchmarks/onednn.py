"""What packing the weights for oneDNN gives on this CPU: products of a few rows, and the decoding passes of a target.

``python benchmarks/onednn.py``: plain and packed layers of fp32 and bf16 take turns, first alone, then as a whole: a
pass over 1 to 8 tokens behind 200 cached ones, on the embedded target and on a random one of the shape of SmolLM2-135M.
A pass over K + 1 tokens verifies K drafted ones; what it costs in steps of one token is what drafting has to earn back.
Beside the products alone stand layers of a drafter in int8, their inputs' rounding included: with rounded numbers, and
with integers; and torch's product of int8 weights and bf16 inputs.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from common import alternate, print_table, write_result
from specdraft.decoding.passes import Pass
from specdraft.drafters.quantization import SCHEMES, IntegerLinear, QuantizedLinear, RoundedInput, quantize_weight
from specdraft.onednn import PackedLinear
from specdraft.targets import Target

SHAPES = ((256, 768), (576, 1536), (2048, 8192))
TOKENS = (1, 2, 4, 6, 8)
HELD = 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def embedded(dtype: torch.dtype, packed: bool) -> Target:
    """The embedded target."""
    return Target.load("embedded://tiny", dtype=str(dtype).removeprefix("torch."), device="cpu", packed=packed)


def smollm2(dtype: torch.dtype, packed: bool) -> Target:
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
    model = LlamaForCausalLM(config).to(dtype)
    target = Target.from_model(model, name="random weights in the shape of SmolLM2-135M")
    if packed:
        target.pack()
    return target


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
    """Products of a few rows, by every way."""
    measured = []
    for inputs, outputs in SHAPES:
        ways = _ways(inputs, outputs)
        for rows in (*TOKENS, 64, 512):
            given = torch.randn(rows, inputs)
            runs = {name: partial(_timed_product, way, given) for name, way in ways.items()}
            times = alternate(runs, rounds)
            entry = {name: statistics.median(each) for name, each in times.items()}
            measured.append({"inputs": inputs, "outputs": outputs, "rows": rows, **entry})
    return measured


def _timed_product(way: tuple[torch.dtype, Callable[[torch.Tensor], Any]], given: torch.Tensor) -> float:
    dtype, multiply = way
    given = given.to(dtype)
    return timed(lambda: multiply(given), 0.05)


def _ways(inputs: int, outputs: int) -> dict[str, tuple[torch.dtype, Callable[[torch.Tensor], Any]]]:
    """By name: the dtype of the input, and the product with the same weight."""
    linear = nn.Linear(inputs, outputs, bias=False)
    ways: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], Any]]] = {}
    for name, dtype in DTYPES.items():
        plain = copy.deepcopy(linear).to(dtype)
        ways[f"plain {name}"], ways[f"packed {name}"] = (dtype, plain), (dtype, PackedLinear(plain))
    layer = QuantizedLinear(linear, SCHEMES["int8"])
    rounded = RoundedInput(PackedLinear(linear), layer.scheme)
    ways |= {"int8, rounded fp32": (torch.float32, rounded), "int8, integers": (torch.float32, IntegerLinear(layer))}
    codes, scales = quantize_weight(linear.weight, layer.scheme)
    alone = partial(torch.ops.aten._weight_int8pack_mm, mat2=codes, scales=scales[:, 0].bfloat16())
    ways["int8 weight alone"] = torch.bfloat16, alone
    return ways


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
        measured.append({"tokens": tokens, **entry})
    for entry in measured:
        entry |= {f"{name}, in steps": entry[name] / measured[0][name] for name in targets}
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
    names = list(alone[0])[3:]
    rows = [
        [f"{each['inputs']} x {each['outputs']}", str(each["rows"])] + [f"{1e6 * each[name]:.0f}" for name in names]
        for each in alone
    ]
    print_table(["product, us", "rows", *names], rows)
    whole = {}
    for load in (embedded, smollm2):
        targets = {
            f"{how} {name}": load(dtype, how == "packed")
            for name, dtype in DTYPES.items()
            for how in ("plain", "packed")
        }
        title = next(iter(targets.values())).identity.name
        found = whole[title] = passes(targets, arguments.rounds)
        print()
        steps = [f"{name}, in steps" for name in targets]
        rows = [
            [f"{each['tokens']} tokens", *(f"{1e3 * each[name]:.2f}" for name in targets)]
            + [f"{each[name]:.2f}x" for name in steps]
            for each in found
        ]
        print_table([f"{title}, ms", *targets, *steps], rows)
    path = write_result("onednn", {**vars(arguments), "held": HELD}, {"products": alone, "passes": whole})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
