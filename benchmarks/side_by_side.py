"""Tokens a second of the decode loop for 1, 16 and 128 requests of unequal lengths, plain and with an EAGLE-3 head.

``python benchmarks/side_by_side.py --reference CHECKOUT``: this checkout and another one (an older commit, say) take
turns, a process each. The head is not trained: what a round costs does not depend on that, how many tokens it emits
does, so that rounds a second are reported beside tokens a second. ``--compile`` adds this one with compiled passes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BATCHES = (1, 16, 128)
NEW_TOKENS = 32


def measure(compiled: bool) -> dict[str, list[float]]:
    """[tokens/s, rounds/s] by what is decoded, of this process."""
    from contextlib import AbstractContextManager, nullcontext

    import torch

    from specdraft.decoding.decoder import Decoder
    from specdraft.drafters.eagle import Eagle3
    from specdraft.targets import Target

    def active() -> AbstractContextManager[None]:
        if not compiled:
            return nullcontext()
        from specdraft.decoding.compilation import compiling  # the reference may be older

        return compiling(True)

    target = Target.load("embedded://tiny", dtype="float32")
    torch.manual_seed(0)
    head = Eagle3.for_target(target, torch.arange(0, target.vocab_size, 2)).eval()
    lengths = torch.randint(10, 120, (max(BATCHES),)).tolist()
    prompts = [torch.randint(1, target.vocab_size, (length,)).tolist() for length in lengths]
    found = {}
    for batch in BATCHES:
        for name, drafter in (("plain", None), ("eagle3", head)):
            decoder = Decoder(target, drafter, 5)
            with active():
                decoder.generate_batch(prompts[:batch], 8, batch)
                started = time.perf_counter()
                results = decoder.generate_batch(prompts[:batch], NEW_TOKENS, batch)
            seconds = time.perf_counter() - started - sum(each.prefill_seconds for each in results)
            rounds = max(len(each.accepted) or len(each.tokens) - 1 for each in results)
            tokens = sum(len(each.tokens) - 1 for each in results)
            found[f"{name}, {batch}"] = [tokens / seconds, rounds / seconds]
    return found


def run(checkout: str, *options: str) -> dict[str, list[float]]:
    """``measure`` of another checkout's package."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([checkout, str(ROOT / "benchmarks")])}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Take turns, print the table, record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, help="another checkout")
    parser.add_argument("--compile", action="store_true", help="also with compiled passes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.compile)))
        return
    import specdraft.threads  # noqa: F401  # how the processes' threads wait; a reference may know nothing of it

    from common import print_table, write_result

    contenders: dict[str, list[str]] = {"this": [str(ROOT)]}
    if options.reference:
        contenders["reference"] = [str(options.reference.resolve())]
    if options.compile:
        contenders["compiled"] = [str(ROOT), "--compile"]
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, (checkout, *more) in contenders.items():
            runs[name].append(run(checkout, *more))
    table = {
        name: {case: [statistics.median(each[case][i] for each in found) for i in (0, 1)] for case in found[0]}
        for name, found in runs.items()
    }
    rows = []
    for case in table["this"]:
        rates = [f"{found[case][0]:,.0f} ({found[case][1]:.1f})" for found in table.values()]
        best = table.get("reference", table["this"])[case][0]
        rows.append([case, *rates, *(f"{found[case][0] / best:.2f}x" for found in table.values())])
    print_table(["requests", *table, *(f"{name} / reference" for name in table)], rows)
    if options.record:
        settings = {"rounds": options.rounds, "tokens": NEW_TOKENS}
        print(write_result("side_by_side", settings, {"median": table, "runs": runs}))


if __name__ == "__main__":
    main()
