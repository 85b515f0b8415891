"""``make parity``: exported drafters in the real vLLM give the same tokens and exactly the same counts as our decoder.

Trains short drafters on the embedded target unless ``--head`` names a checkpoint, exports them, decodes held-out
prompts here and in vLLM (another environment, another process), and compares. Above temperature 0 it compares
acceptance lengths: vLLM's own greedy drafts and, with ``draft_sample_method``, sampled ones. Exits with 1 if anything
differs. Quantized drafters multiply integers as this processor does (``saturating.py``).
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from comparison import Run, decode, differences, rate_difference, table
from engine import MAX_NEW_TOKENS, Engine, add_arguments, held_out_prompts
from mimo import mimo
from saturating import multiplies_exactly, saturate
from short import LEAST_ACCEPTANCE_LENGTH, MIMO, QUANTIZED, SHORT, SPECULATORS, STRANGERS, source, trained
from stranger import stranger

from specdraft.data.tokenization.tokenize import available_cores
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, find, load_drafter, read_config
from specdraft.errors import exit_on_user_error
from specdraft.export import export
from specdraft.export.engine import GREEDY, SAMPLED
from specdraft.export.speculators import Speculators
from specdraft.export.vllm import VLLM
from specdraft.targets import Target

WARM = 1.0  # the temperature at which rates are compared, of the first of the drafters that vLLM samples drafts of


@dataclass(frozen=True)
class Exported:
    """A drafter, its family, and its directory for vLLM."""

    drafter: Drafter
    family: str
    directory: Path

    @classmethod
    def of(cls, name: str, checkpoint: Path, drafter: Drafter, work: Path) -> "Exported":
        """Exports the checkpoint, which ``drafter`` was read from, under a name."""
        engine = (Speculators if name in SPECULATORS else VLLM)(dtype="float32")
        directory = export(checkpoint, engine, work / "exported" / name, drafter.quantization).resolve()
        return cls(drafter, drafter.family, directory)

    @property
    def overrides(self) -> dict[str, object]:
        """What vLLM adds to the target's configuration."""
        return VLLM.target_settings.get(self.family, {})

    def flags(self, num_draft_tokens: int, drafting: str = GREEDY) -> str | None:
        """How vLLM is started with it; None if it does not draft so."""
        return VLLM.flags(self.family, str(self.directory), num_draft_tokens, drafting)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", help="a checkpoint or run directory; without it short drafters are trained, once")
    names = [*SHORT, *QUANTIZED, *SPECULATORS, *STRANGERS]
    usual = [*SHORT, next(iter(QUANTIZED)), next(iter(SPECULATORS))]  # one of each way of writing them
    parser.add_argument("--models", nargs="+", choices=names, default=usual, help="which to train and compare")
    add_arguments(parser, "parity")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """Export, decode on both sides, compare, and say so."""
    options = arguments()
    engine = Engine.of(options)
    torch.set_num_threads(1)
    started = time.perf_counter()
    if options.head:
        checkpoints = {"the head": find(options.head)}
    else:
        targets = {name: str(mimo(engine.work / "mimo")) for name in MIMO if name in options.models}
        starts = {name: str(stranger(engine.work / "stranger")) for name in STRANGERS if name in options.models}
        with ThreadPoolExecutor(available_cores()) as pool:  # the first lets the target answer, and all read it
            sources = {name: source(name)[0] for name in options.models}
            needed = list(dict.fromkeys(sources.values()))
            runs = pool.map(lambda name: trained(name, engine.work, targets.get(name), starts.get(name)), needed)
            found = dict(zip(needed, runs, strict=True))
            checkpoints = {name: found[trained_as] for name, trained_as in sources.items()}
    print(f"training {time.perf_counter() - started:.0f} s")
    groups: dict[str, dict[str, Path]] = {}  # by target
    for name, checkpoint in checkpoints.items():
        groups.setdefault(read_config(checkpoint)["target"]["name"], {})[name] = checkpoint
    failed = [compare(group, engine, options, not index) for index, group in enumerate(groups.values())]
    sys.exit(1 if any(failed) else 0)


def compare(checkpoints: Mapping[str, Path], engine: Engine, options: argparse.Namespace, warms: bool) -> bool:
    """Decode with drafters of one target on both sides and print what was counted; whether anything differs. warms:
    with the first of them above temperature 0 too."""
    cases = {}
    for name, checkpoint in checkpoints.items():
        drafter, config = load_drafter(checkpoint, source(name)[1])
        cases[name] = Exported.of(name, checkpoint, drafter, engine.work)
        if drafter.quantization is not None and not multiplies_exactly():
            saturate(drafter)
            print(f"{name}: integer products saturate on this processor, in vLLM and so in our decoder here")
    named = config["target"]
    target = Target.load(named["name"], named["revision"], dtype="float32", device="cpu")
    check_target(config, target)
    k = options.num_draft_tokens
    prompts = held_out_prompts(target, options.prompts, k)
    started = time.perf_counter()
    warm = next((name for name, case in cases.items() if warms and case.flags(k, SAMPLED)), None)
    shapes = {drafting: StaticTree.chain(k, sampled=drafting == SAMPLED) for drafting in (GREEDY, SAMPLED) if warm}
    runs = [{"name": name, "flags": case.flags(k), "overrides": case.overrides} for name, case in cases.items()]
    if warm:
        sampled = {"overrides": cases[warm].overrides, "temperature": WARM}
        runs += [{"name": drafting, "flags": cases[warm].flags(k, drafting), **sampled} for drafting in shapes]
    with ThreadPoolExecutor(1) as pool:  # vLLM beside our decoder, a core for each
        waiting = pool.submit(engine.answers, target, prompts, runs)
        ours = {name: decode(Decoder(target, case.drafter, k), prompts, MAX_NEW_TOKENS) for name, case in cases.items()}
        warm_ours = {
            drafting: decode(Decoder(target, cases[warm].drafter, shape, Sampling(WARM)), prompts, MAX_NEW_TOKENS)
            for drafting, shape in shapes.items()
            if warm
        }
        theirs = waiting.result()
    print(
        f"decoding {time.perf_counter() - started:.0f} s\n\n"
        f"{target.architecture}, {len(prompts)} held-out prompts x {MAX_NEW_TOKENS} tokens, K = {k}, greedy, float32"
    )
    failed = False
    for name, run in ours.items():
        print(f"\n== {name} ==\n" + table(run, theirs["plain"], theirs[name]))
        found = differences(run, theirs["plain"], theirs[name], LEAST_ACCEPTANCE_LENGTH[cases[name].family])
        print("\n".join(f"DIFFERENT: {line}" for line in found) if found else "equal: tokens and all counts")
        failed = failed or bool(found)
    return rates_differ(warm, warm_ours, theirs, bool(options.head)) or failed


def rates_differ(name: str | None, ours: Mapping[str, Run], theirs: Mapping[str, Run], own_head: bool) -> bool:
    """Compare acceptance above temperature 0, of each way of drafting; the two ways must be told apart."""
    failed = False
    for drafting, run in ours.items():
        gap, (low, high) = rate_difference(run, theirs[drafting])
        rounds = sum(map(len, theirs[drafting].accepted_per_round))
        equal = low <= 0 <= high
        print(
            f"\n{'equal' if equal else 'DIFFERENT'}: {name} at temperature {WARM:g}, {drafting} drafts: acceptance "
            f"length {run.acceptance_length:.3f} by our decoder, {theirs[drafting].acceptance_length:.3f} by vLLM in "
            f"{rounds} rounds; difference {gap:+.3f} [{low:+.3f}, {high:+.3f}] (99.9 %)"
        )
        failed = failed or not equal
    if ours:
        # Equality is held at 99.9 %, so that chance seldom fails a run; this has to be seen on 16 prompts too.
        low, high = rate_difference(ours[GREEDY], theirs[SAMPLED], confidence=0.95)[1]
        if low <= 0 <= high:
            print("The two ways of drafting are accepted alike here: this comparison would not notice the wrong one.")
            failed = failed or not own_head  # the short drafters do tell them apart
    return failed


if __name__ == "__main__":
    main()
