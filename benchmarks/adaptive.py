"""Chains as long as pays, beside chains of every fixed length, for requests side by side.

``python benchmarks/adaptive.py CHECKPOINT``: all decode the same prompts in turns, and each answers all of them: where
one ends the next one begins. What is not counted comes first: rounds of every fixed length, of as many requests and of
fewer, whose times say what a drafted token costs. Times are of the rounds, without the prompts' passes.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import alternate, print_table, write_result
from specdraft.data.prompts import encode, usual_benchmark
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.pacing import Goodput, acceptance_rate, costs_of_tokens
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.threads import FEW_TOKENS, limited
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import load_prompts
from specdraft.evaluation.bootstrap import bootstrap_interval
from specdraft.targets import Target

IDLE = "no draft"
_PILOT = 3  # turns, of whose times the middle one counts
COLUMNS = ("batch", "T", "plain", "fixed lengths, tokens/s", "as long as pays", "costs", "beside the best fixed")


def decode(
    target: Target, drafter: Any, sampling: Sampling, prompts: list[list[int]], tokens: int,
    shape: StaticTree | None, batch: int, turn: int = 0,
) -> tuple[float, float, float]:  # fmt: skip
    """Tokens a second, and seconds a round of a full batch, without the prompts' passes; how often a token was
    accepted. Of some of the prompts, several for each place of the batch; every turn samples other answers."""
    decoder = Decoder(target, drafter if shape else None, shape or 1, sampling)
    told, seconds, full = 0, 0.0, list[float]()
    prompts = prompts[: max(4 * batch, 8)]
    waiting, judged = iter(enumerate(prompts)), list[tuple[int, int]]()
    with torch.inference_mode():
        requests = Requests(decoder, batch, max(map(len, prompts)) + tokens + decoder.num_draft_tokens + 1)
        while True:
            while len(requests.under_way) < batch and (following := next(waiting, None)) is not None:
                number, prompt = following
                requests.begin(number, prompt, tokens, number + len(prompts) * turn)
            if not requests.under_way:
                return told / seconds, statistics.median(full), acceptance_rate(judged)
            side_by_side = len(requests.under_way)
            few = side_by_side * (1 + requests.num_read) <= FEW_TOKENS
            started = time.perf_counter()
            with limited(target.decoding_threads if few else None):
                requests.round()
            spent = time.perf_counter() - started
            seconds += spent
            if side_by_side == batch:
                full.append(spent)
            for index in reversed(range(len(requests.under_way))):
                result = requests.under_way[index].result
                if len(result.tokens) >= tokens:
                    judged += zip(result.drafted, result.accepted, strict=True)
                    told += tokens - 1
                    requests.drop(index)


def costs_of(
    decoded: Callable[..., tuple[float, float, float]], fixed: dict[str, StaticTree], batch: int
) -> tuple[tuple[float, ...], float, float, dict[str, float]]:
    """Of drafted tokens with so many requests side by side, and of a round without any; how often one is accepted, and
    the seconds of rounds."""
    never = StaticTree.chain(1, stop=Goodput((1.0,), expected=0.0))
    ways: dict[str, StaticTree | None] = {"plain": None, IDLE: never, **fixed}
    turns = [{name: decoded(shape, batch) for name, shape in ways.items()} for _ in range(_PILOT)]
    full = {name: statistics.median(turn[name][1] for turn in turns) for name in ways}
    costs = costs_of_tokens(full["plain"], {shape.depth: full[name] for name, shape in fixed.items()})
    return costs, max(full[IDLE] / full["plain"] - 1.0, 0.0), turns[0][list(fixed)[-1]][2], full


def measure(
    decoded: Callable[..., tuple[float, float, float]], fixed: dict[str, StaticTree], batch: int,
    rounds: int, sampled: bool,
) -> dict[str, Any]:  # fmt: skip
    """All ways in turns, after some turns that find the costs."""
    decoded(None, batch)  # warms up
    sizes = sorted({batch, max(batch // 4, 1)})  # as requests end, fewer are side by side
    pilot = {size: costs_of(decoded, fixed, size) for size in sizes}
    costs, (_, idle, expected, _) = {size: each[0] for size, each in pilot.items()}, pilot[batch]
    longest = max(shape.depth for shape in fixed.values())
    goodput = StaticTree.chain(longest, sampled, Goodput(costs, expected, idle))
    ways: dict[str, StaticTree | None] = {"plain": None, **fixed, "goodput": goodput}

    def rate(shape: StaticTree | None, turns: Iterator[int]) -> float:
        return decoded(shape, batch, next(turns))[0]

    rates = alternate({name: partial(rate, shape, count()) for name, shape in ways.items()}, rounds)
    middle = {name: statistics.median(each) for name, each in rates.items()}
    ratios = beside_best(rates, list(fixed))
    found = {
        "costs": costs,
        "idle": idle,
        "expected": expected,
        "tokens_a_second": middle,
        "best": max(fixed, key=middle.__getitem__),
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap_interval(torch.tensor([[each, 1.0] for each in ratios]), _mean),
    }
    return found | {"all": rates, "round_seconds": {size: each[3] for size, each in pilot.items()}}


def beside_best(rates: dict[str, list[float]], fixed: list[str]) -> list[float]:
    """In every turn, beside the fixed length that was fastest in the others: the fastest of the same turn, of several
    that are equally good, is the luckiest one."""
    ratios = []
    for turn, ours in enumerate(rates["goodput"]):
        others = {name: statistics.median(rates[name][:turn] + rates[name][turn + 1 :]) for name in fixed}
        ratios.append(ours / rates[max(fixed, key=others.__getitem__)][turn])
    return ratios


def _mean(sums: Tensor) -> Tensor:
    """Over turns, of sums and counts ``[R, 2]``."""
    return sums[:, 0] / sums[:, 1]


@exit_on_user_error
def main() -> None:
    """Parse options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a run, a drafter, or embedded://NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--longest", type=int, default=6, help="drafted tokens (default 6)")
    parser.add_argument("--prompts", help="a .jsonl file as benchmark= takes it (default: the usual one of the target)")
    parser.add_argument("--limit", type=int, default=64, help="prompts (default 64)")
    parser.add_argument("--skip", type=int, default=0, help="so many of the prompts before them (default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5, help="turns of all ways (default 5, at least 2)")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: expected at least 2, as a turn is compared with the best length of the others")

    drafter, config = load_drafter(options.checkpoint)
    target = Target.load(config["target"]["name"], dtype="float32")
    check_target(config, target)
    chosen = load_prompts(options.prompts or usual_benchmark(config), options.skip + options.limit)
    prompts = [encode(target.tokenizer, each.opening) for each in chosen[options.skip :]]
    measured, rows = [], []
    plainly = Decoder(target).generate_batch(prompts, options.max_new_tokens, max(options.batch_sizes))
    pairs = zip(prompts, plainly, strict=True)
    prompts = [ids for ids, said in pairs if len(said.tokens) == options.max_new_tokens]
    with ready_to_decode(drafter.eval()):
        for temperature in options.temperatures:
            sampled, sampling = temperature > 0, Sampling(temperature)
            fixed = {f"K={k}": StaticTree.chain(k, sampled) for k in range(1, options.longest + 1)}
            for batch in options.batch_sizes:
                given = target, drafter, sampling, prompts, options.max_new_tokens
                found = measure(partial(decode, *given), fixed, batch, options.rounds, sampled)
                measured.append({"batch_size": batch, "temperature": temperature, **found})
                speed = found["tokens_a_second"]
                lengths = ", ".join(f"{speed[f'K={k}']:.0f}" for k in range(1, options.longest + 1))
                row = [str(batch), f"{temperature:g}", f"{speed['plain']:.0f}", lengths, f"{speed['goodput']:.0f}"]
                costs = ", ".join(f"{cost:.2f}" for cost in found["costs"][batch])
                low, high = found["ratio_interval"] or (float("nan"),) * 2
                rows.append([*row, costs, f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}] ({found['best']})"])
                print_table(COLUMNS, rows)
    prompts_file = Path(options.prompts).name if options.prompts else None
    settings = vars(options) | {"checkpoint": drafter.family, "prompts": prompts_file}
    print(f"\nwritten to {write_result('adaptive', settings, {'measured': measured})}")


if __name__ == "__main__":
    main()
