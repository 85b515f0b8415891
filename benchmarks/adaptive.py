"""Chains that end where a token does not pay, beside chains of every fixed length, for requests side by side.

``python benchmarks/adaptive.py CHECKPOINT``: all decode the same prompts in turns. What is not counted comes first: a
pilot that tells what is accepted, and a turn that gives the price of a drafted token at each batch size, from the
fastest chain of fixed length.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import alternate, print_table, write_result
from specdraft.data.prompts import encode, usual_benchmark
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Goodput, Learned, price_of_a_token
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import EvaluationSettings, load_prompts
from specdraft.evaluation.pilot import Pilot
from specdraft.evaluation.ways import Way
from specdraft.targets import Target

COLUMNS = ("batch", "T", "plain", "fixed lengths, tokens/s", "as long as it pays", "price", "beside the best fixed")


class Runs:
    """One batch size and temperature: ways of decoding the prompts, and what each did last."""

    def __init__(self, decode: Callable[[StaticTree | None], tuple[int, int, float]]) -> None:
        self.decode = decode
        self.last: dict[str, tuple[int, int, float]] = {}

    def rate(self, name: str, shape: StaticTree | None) -> float:
        """Tokens a second."""
        tokens, _, seconds = self.last[name] = self.decode(shape)
        return tokens / seconds

    def round_seconds(self, name: str) -> float:
        """Of the last run."""
        _, rounds, seconds = self.last[name]
        return seconds / rounds


def decode(
    target: Target, drafter: Any, sampling: Sampling, prompts: list[list[int]], tokens: int, batch: int,
    shape: StaticTree | None,
) -> tuple[int, int, float]:  # fmt: skip
    """Tokens, rounds and seconds, without the prompts' passes: batches of equal size, one after the other."""
    decoder = Decoder(target, drafter if shape else None, shape or 1, sampling)
    count, rounds, seconds = 0, 0, 0.0
    for start in range(0, len(prompts), batch):
        given = prompts[start : start + batch]
        started = time.perf_counter()
        found = decoder.generate_batch(given, tokens, batch, list(range(start, start + len(given))))
        seconds += time.perf_counter() - started - sum(each.prefill_seconds for each in found)
        rounds += max(len(each.accepted) or len(each.tokens) - 1 for each in found)
        count += sum(len(each.tokens) - 1 for each in found)
    return count, rounds, seconds


def measure(runs: Runs, longest: int, rounds: int, sampled: bool, weights: Any) -> dict[str, Any]:
    """All ways in turns, after a turn that finds the price."""
    fixed: dict[str, StaticTree | None] = {f"K={k}": StaticTree.chain(k, sampled) for k in range(1, longest + 1)}
    ways = {"plain": None, **fixed}
    runs.rate("plain", None)  # warms up
    pilot = {name: runs.rate(name, shape) for name, shape in ways.items()}
    best = max(fixed, key=pilot.__getitem__)
    seconds = runs.round_seconds(best), runs.round_seconds("plain")
    price = price_of_a_token(int(best[2:]), pilot[best] / pilot["plain"], *seconds)
    ways["goodput"] = StaticTree.chain(longest, sampled, Goodput(price, weights))
    rates = alternate({name: partial(runs.rate, name, shape) for name, shape in ways.items()}, rounds)
    middle = {name: statistics.median(each) for name, each in rates.items()}
    fastest = max(fixed, key=middle.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(rates["goodput"], rates[fastest], strict=True)]
    ratio = statistics.median(ratios)
    return {"price": price, "tokens_a_second": middle, "best": fastest, "ratio": ratio, "all": rates}


@exit_on_user_error
def main() -> None:
    """Parse options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a run, a drafter, or embedded://NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--longest", type=int, default=6, help="drafted tokens (default 6)")
    parser.add_argument("--prompts", help="a .jsonl file as benchmark= takes it (default: the usual one of the target)")
    parser.add_argument("--limit", type=int, default=16, help="prompts (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    drafter, config = load_drafter(options.checkpoint)
    target = Target.load(config["target"]["name"], dtype="float32")
    check_target(config, target)
    chosen = load_prompts(options.prompts or usual_benchmark(config), options.limit)
    prompts = [encode(target.tokenizer, each.opening) for each in chosen]
    pilot = Pilot(target, chosen, EvaluationSettings(max_new_tokens=options.max_new_tokens), False, {})
    measured, rows = [], []
    with ready_to_decode(drafter.eval()):
        for temperature in options.temperatures:
            untaught = StaticTree.chain(options.longest, temperature > 0, Learned())
            taught = pilot.settled(Way("head", drafter, untaught), temperature)
            assert isinstance(taught, StaticTree) and isinstance(taught.stop, Learned)
            for batch in options.batch_sizes:
                given = target, drafter, Sampling(temperature), prompts, options.max_new_tokens, batch
                found = measure(
                    Runs(partial(decode, *given)), options.longest, options.rounds, temperature > 0, taught.stop.weights
                )
                measured.append({"batch_size": batch, "temperature": temperature, **found})
                speed = found["tokens_a_second"]
                lengths = ", ".join(f"{speed[f'K={k}']:.0f}" for k in range(1, options.longest + 1))
                row = [str(batch), f"{temperature:g}", f"{speed['plain']:.0f}", lengths, f"{speed['goodput']:.0f}"]
                rows.append([*row, f"{found['price']:.2f}", f"{found['ratio']:.2f} ({found['best']})"])
                print_table(COLUMNS, rows)
    print(f"\nwritten to {write_result('adaptive', vars(options), {'measured': measured})}")


if __name__ == "__main__":
    main()
