"""What raises acceptance at equal tokens: one option of a recipe changed at a time, over several seeds.

``python benchmarks/ablation.py --target tiny --seeds 0 1 2``: every arm is trained through ``train.py`` as it is, for
the same steps on the same data, and its best drafter decodes the same held-out prompts at temperature 0 and 1.
Trainings that a former call finished in ``--work`` are not repeated. The table says what each arm gains over the
recipe, seed by seed, so that luck of the initialisation does not count.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import REPOSITORY, print_table, write_result
from specdraft.data.prompts import check_lengths, encode, load_prompts, usual_benchmark
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.checkpoint import check_target, find, load_drafter, read_config
from specdraft.errors import UserError, exit_on_user_error
from specdraft.onednn import packed
from specdraft.targets import Target

RECIPE = "recipe"
EAGLE3 = "model=eagle3"
MUON = ["model.optimizer.name=muon", "model.optimizer.muon_learning_rate=3e-3"]  # as EAGLE-3's recipes have it
PUBLISHED = {  # what EAGLE-3's paper has, and recipes for small data have not
    "hidden states as they are": ["model.drafter.fc_norm=false"],
    "feedback as it is": ["model.drafter.norm_output=false"],
    "half of the vocabulary": ["model.draft_vocab_size={half}"],
    "five steps": ["model.drafter.ttt_steps=5", "model.drafter.step_decay=0.8"],
}
ARMS: Mapping[str, Sequence[str]] = {
    RECIPE: [EAGLE3],
    **{name: [EAGLE3, *overrides] for name, overrides in PUBLISHED.items()},
    "as published": [EAGLE3, *(each for overrides in PUBLISHED.values() for each in overrides)],
    # Other heads, which read the embedding of the newest token beside the state, not in the attention alone.
    "EAGLE-1": ["model=eagle"],
    "MTP": ["model=mtp"],
    "EAGLE-1, Muon": ["model=eagle", *MUON],
    "MTP, Muon": ["model=mtp", *MUON],
    # What those have and EAGLE-3 has not.
    "last state among the features": [EAGLE3, "model.drafter.layers={last}"],
    "projection frozen": [EAGLE3, "model.drafter.projection=frozen"],
    "projection and norm frozen": [EAGLE3, "model.drafter.projection=frozen", "model.drafter.output_norm=frozen"],
    "norm as the target's": [EAGLE3, "model.drafter.output_norm=target"],
    "regression to the last state": [EAGLE3, "model.drafter.regression_weight=1"],
    # What the literature recommends.
    "norm before the fusion": [EAGLE3, "model.drafter.fc_norm=false", "model.drafter.norm_before_fc=true"],
    "norm before fusion and residual": [
        EAGLE3,
        "model.drafter.fc_norm=false",
        "model.drafter.norm_before_fc=true",
        "model.drafter.norm_before_residual=true",
    ],
    "norms of queries and keys": [EAGLE3, "model.drafter.qk_norm=true"],
    "weights by confidence (D-PACE)": [EAGLE3, "model.drafter.confidence_smoothing=0.5"],
    "AdamW": [EAGLE3, "model.optimizer.name=adamw"],
    "every answer counts alike": [EAGLE3, "model.drafter.sequence_mean=true"],
    "steps grow over the first half": [EAGLE3, "model.drafter.ttt_growth=0.5"],
    "LK hybrid": [EAGLE3, "model.drafter.divergence=lk_hybrid"],
    "warm-up, stable, decay": [EAGLE3, "model.optimizer.schedule=wsd"],
    "twice as many layers": [EAGLE3, "model.drafter.num_layers=2"],
}
TEMPERATURES = (0.0, 1.0)
BATCH = 16  # requests side by side; acceptance does not depend on it


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny", help="of conf/target")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="recipe is always among them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/ablation", help="where trainings are kept")
    parser.add_argument("--override", nargs="*", default=[], help="of every training, as data.limit=1000")
    return parser.parse_args()


def trained(name: str, seed: int, options: argparse.Namespace, of_target: Mapping[str, str]) -> Path:
    """The run of an arm, trained if it is not there or was cut off. of_target: what its overrides take from it."""
    run = options.work / f"{options.target}-{options.steps}" / re.sub(r"\W+", "-", name) / str(seed)
    overrides = [part.format(**of_target) for part in ARMS[name]]
    overrides += [f"target={options.target}", f"seed={seed}", "data.seed=0", f"trainer.max_steps={options.steps}"]
    overrides += ["live.every_n_steps=0", "evaluate=false", "export=null", *options.override]
    done = run / "overrides.json"  # written last
    if done.is_file() and json.loads(done.read_text()) == overrides:
        return find(run)
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(REPOSITORY / "train.py"), *overrides, f"hydra.run.dir={run}"]
    with (run / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=REPOSITORY, env=os.environ, stdout=log, stderr=log).returncode
    if code:
        raise UserError(f"the arm {name!r}, seed {seed}, was not trained: {run / 'log.txt'} says why")
    done.write_text(json.dumps(overrides))
    return find(run)


def acceptance(checkpoint: Path, target: Target, prompts: Sequence[list[int]], options: argparse.Namespace) -> Any:
    """Acceptance length by temperature and drafting, and the loss-free facts of the drafter."""
    drafter, config = load_drafter(checkpoint)
    check_target(config, target)
    drafter.bind(target)
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in drafter.parameters())}
    with packed(drafter):
        for temperature in TEMPERATURES:
            for drafting in ("greedy", "sampled") if temperature else ("greedy",):
                shape = StaticTree.chain(options.num_draft_tokens, sampled=drafting == "sampled")
                decoder = Decoder(target, drafter, shape, Sampling(temperature))
                counts = AcceptanceCounts(options.num_draft_tokens)
                for each in decoder.generate_batch(prompts, options.max_new_tokens, BATCH):
                    counts.add(each)
                found[f"T={temperature:g}, {drafting} drafts"] = counts.acceptance_length
    return found


def gain(rows: Sequence[Mapping[str, Any]], arm: str, measure: str) -> str:
    """Mean over the seeds, and the change against the recipe of the same seeds with twice its standard error."""
    own = {row["seed"]: row[measure] for row in rows if row["arm"] == arm}
    base = {row["seed"]: row[measure] for row in rows if row["arm"] == RECIPE}
    mean = f"{statistics.fmean(own.values()):.2f}"
    changes = [own[seed] / base[seed] - 1 for seed in own]
    if arm == RECIPE:
        return mean
    error = f" ± {2 * statistics.stdev(changes) / math.sqrt(len(changes)):.1%}" if len(changes) > 1 else ""
    return f"{mean} ({statistics.fmean(changes):+.1%}{error})"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of what is measured so far, the recipe first."""
    measures = [name for name in rows[0] if name.startswith("T=")]
    table = [[arm, *(gain(rows, arm, name) for name in measures)] for arm in dict.fromkeys(row["arm"] for row in rows)]
    print_table(["arm", *measures], table)


@exit_on_user_error
def main() -> None:
    """Train, measure, print and write."""
    options = arguments()
    arms = list(dict.fromkeys([RECIPE, *options.arms]))
    first = read_config(trained(RECIPE, options.seeds[0], options, {}))
    target = Target.load(first["target"]["name"], first["target"]["revision"], dtype="float32", device="cpu")
    found = load_prompts(usual_benchmark(first), options.prompts)
    check_lengths(target.tokenizer, found, target.max_length, options.max_new_tokens)
    prompts = [encode(target.tokenizer, prompt.opening) for prompt in found]
    layers = target.default_layers()
    last = str([*layers[:-1], target.num_layers]).replace(" ", "")
    of_target = {"last": last, "half": str(target.vocab_size // 2)}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:  # all arms of a seed first: an interrupted run still compares
        for arm in arms:
            run = trained(arm, seed, options, of_target)
            rows.append({"arm": arm, "seed": seed} | acceptance(run, target, prompts, options))
            show(rows)
    settings = {name: value for name, value in vars(options).items() if name != "work"}
    settings |= {"overrides": {arm: list(ARMS[arm]) for arm in arms}, "cores": available_cores()}
    print(write_result("ablation", settings, {"rows": rows}))


if __name__ == "__main__":
    main()
