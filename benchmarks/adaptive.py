"""Chains that end where a token does not pay, beside chains of every fixed length, for requests side by side.

``python benchmarks/adaptive.py CHECKPOINT``: all decode the same prompts in turns. What is not counted comes first: a
pilot that tells what is accepted, and the times of a round of so many requests, which give the price of a drafted token
by the fastest chain of fixed length. Rates are those of full batches: a batch is decoded until its first answer has all
its tokens, and prompts whose answers are shorter take no part.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common import alternate, print_table, write_result
from specdraft.data.prompts import encode, usual_benchmark
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Goodput, Learned, price_of_a_token
from specdraft.decoding.threads import FEW_TOKENS, limited
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import EvaluationSettings, load_prompts
from specdraft.evaluation.pilot import Pilot
from specdraft.evaluation.ways import Way
from specdraft.targets import Target

COLUMNS = ("batch", "T", "plain", "fixed lengths, tokens/s", "as long as it pays", "price", "beside the best fixed")


def decode(
    target: Target, drafter: Any, sampling: Sampling, prompts: list[list[int]], tokens: int, batch: int,
    shape: StaticTree | None,
) -> tuple[float, float]:  # fmt: skip
    """Tokens a second of full batches, and seconds a round, without the prompts' passes."""
    decoder = Decoder(target, drafter if shape else None, shape or 1, sampling)
    count, rounds, seconds = 0, 0, 0.0
    for start in range(0, len(prompts) - batch + 1, batch):
        given = prompts[start : start + batch]
        with torch.inference_mode():
            requests = Requests(decoder, batch, max(map(len, given)) + tokens + longest_round(decoder))
            for number, prompt in enumerate(given, start):
                requests.begin(number, prompt, tokens, number)
            few = batch * (1 + requests.num_read) <= FEW_TOKENS
            started = time.perf_counter()
            with limited(target.decoding_threads if few else None):
                while max(len(each.result.tokens) for each in requests.under_way) < tokens:
                    requests.round()
                    rounds += 1
        seconds += time.perf_counter() - started
        count += sum(len(each.result.tokens) - 1 for each in requests.under_way)
    return count / seconds, seconds / rounds


def longest_round(decoder: Decoder) -> int:
    """Tokens that the last round may emit beyond what is asked for."""
    return decoder.num_draft_tokens + 1


def measure(
    decoded: Callable[[StaticTree | None], tuple[float, float]], fixed: dict[str, StaticTree], rounds: int,
    sampled: bool, weights: Any,
) -> dict[str, Any]:  # fmt: skip
    """All ways in turns, after a turn that finds the price."""
    decoded(None)  # warms up
    plain, step = decoded(None)
    pilot = {shape.depth: decoded(shape) for shape in fixed.values()}
    speedup = max(rate for rate, _ in pilot.values()) / plain
    price = price_of_a_token(speedup, step, {length: seconds for length, (_, seconds) in pilot.items()})
    longest = max(pilot)
    ways = {"plain": None, **fixed, "goodput": StaticTree.chain(longest, sampled, Goodput(price, weights))}

    def rate(shape: StaticTree | None) -> float:
        return decoded(shape)[0]

    rates = alternate({name: partial(rate, shape) for name, shape in ways.items()}, rounds)
    middle = {name: statistics.median(each) for name, each in rates.items()}
    fastest = max(fixed, key=middle.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(rates["goodput"], rates[fastest], strict=True)]
    found = {"price": price, "tokens_a_second": middle, "best": fastest, "ratio": statistics.median(ratios)}
    return found | {"all": rates, "step_seconds": step, "round_seconds": {k: each[1] for k, each in pilot.items()}}


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
    plainly = Decoder(target).generate_batch(prompts, options.max_new_tokens, max(options.batch_sizes))
    pairs = zip(prompts, plainly, strict=True)
    prompts = [ids for ids, said in pairs if len(said.tokens) == options.max_new_tokens]
    with ready_to_decode(drafter.eval()):
        for temperature in options.temperatures:
            sampled, sampling = temperature > 0, Sampling(temperature)
            untaught = StaticTree.chain(options.longest, sampled, Learned())
            taught = pilot.settled(Way("head", drafter, untaught), temperature)
            assert isinstance(taught, StaticTree) and isinstance(taught.stop, Learned)
            fixed = {f"K={k}": StaticTree.chain(k, sampled) for k in range(1, options.longest + 1)}
            for batch in options.batch_sizes:
                given = target, drafter, sampling, prompts, options.max_new_tokens, batch
                found = measure(partial(decode, *given), fixed, options.rounds, sampled, taught.stop.weights)
                measured.append({"batch_size": batch, "temperature": temperature, **found})
                speed = found["tokens_a_second"]
                lengths = ", ".join(f"{speed[f'K={k}']:.0f}" for k in range(1, options.longest + 1))
                row = [str(batch), f"{temperature:g}", f"{speed['plain']:.0f}", lengths, f"{speed['goodput']:.0f}"]
                rows.append([*row, f"{found['price']:.2f}", f"{found['ratio']:.2f} ({found['best']})"])
                print_table(COLUMNS, rows)
    print(f"\nwritten to {write_result('adaptive', vars(options), {'measured': measured})}")


if __name__ == "__main__":
    main()
