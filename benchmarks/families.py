r"""Every family of drafters on a small target at equal training tokens: what each accepts, costs and gains.

Each is trained by `train.py model=NAME` on the same batches, then decodes the same held-out prompts as a chain and as a
tree, at temperatures 0 and 1, each beside plain decoding in the same run. At temperature 1 the share of first drafted
tokens that the rule accepts is compared with what theory says of it, the mean of 1 - TV(p, q) over the same rounds.

    python benchmarks/families.py                         train, evaluate, write the result and the table of the docs
    python benchmarks/families.py --families medusa eagle3 --steps 200 --no-docs
    python benchmarks/families.py --target smollm2-135m --benchmark chat --families eagle3 mtp p_eagle dflash \
      --steps 200 --limit 6 --max-new-tokens 48 --overrides data.store=build/smollm2-store data.batch_size=2 \
      model.optimizer.name=muon model.optimizer.muon_learning_rate=3e-3

A drafter that lies under ``build/families`` is not trained again. That store lacks what MTP reads of prompts: it is
trained before, by the same command without the store and with ``--families mtp``.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import print_table, put_into_page, write_result
from specdraft.decoding.rules import Verdict, rejection_sampling
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.checkpoint import load_drafter
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import EvaluationSettings, evaluate, load_prompts
from specdraft.evaluation.speedup.rank_accuracy import measured_tree
from specdraft.targets import Target

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "families.md"
FAMILIES = ["draft", "pard", "medusa", "hydra", "redrafter", "eagle", "eagle3", "eagle3_1", "mtp"]
FAMILIES += ["p_eagle", "dflash", "dspark", "domino", "kangaroo"]
MODELS = {"pard": ("model=draft", "model.drafter.parallel=true")}  # the others are named as their models are
# Whose static tree is made from measured accuracies.
MEASURED = ("pard", "medusa", "hydra", "p_eagle", "dflash", "dspark", "domino")
TEMPERATURES = (0.0, 1.0)
COLUMNS = ("family", "parameters", "draft", "T", "acceptance length", "cost ratio", "speedup", "identical")


class Recorder:
    """Rejection sampling that notes, at every round's root, 1 - TV(p, q) and whether the first token was accepted."""

    def __init__(self) -> None:
        self.expected: list[float] = []
        self.accepted: list[float] = []

    def __call__(self, trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
        """As ``rejection_sampling``."""
        verdict = rejection_sampling(trees, p, uniform)
        if trees.q is not None and trees.num_nodes:
            self.expected += torch.minimum(p[:, 0], trees.q[:, 0]).sum(-1).tolist()
            self.accepted += (verdict.accepted > 0).float().tolist()
        return verdict

    def summary(self) -> dict[str, float]:
        """Means over rounds, and the 95 % half-width of their difference."""
        difference = [a - e for a, e in zip(self.accepted, self.expected, strict=True)]
        return {
            "rounds": len(difference),
            "one_minus_tv": statistics.fmean(self.expected),
            "accepted": statistics.fmean(self.accepted),
            "half_width": 1.96 * statistics.stdev(difference) / len(difference) ** 0.5,
        }


def train(name: str, target: str, steps: int, overrides: list[str], directory: Path) -> Path:
    """Train a family, or keep what an earlier run with as many steps left."""
    run = directory / target / f"{name}-{steps}"
    if not (run / "drafter" / "config.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        command = [sys.executable, "train.py", *MODELS.get(name, (f"model={name}",)), f"target={target}", *overrides]
        options = [
            f"trainer.max_steps={steps}",
            f"live.every_n_steps={steps}",
            f"trainer.val_check_interval={steps}",
            "evaluate=false",
            "export=null",
        ]
        subprocess.run([*command, *options, f"hydra.run.dir={run}"], cwd=ROOT, check=True)
    return run


def measure(name: str, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a trained drafter as a chain and as a tree."""
    drafter, config = load_drafter(run)
    target = Target.load(config["target"]["name"], dtype="float32")
    prompts = load_prompts(options.benchmark, options.limit)
    depth, nodes = options.num_draft_tokens, options.num_nodes
    tree: Shape = DynamicTree(depth, 4, nodes)
    if name in MEASURED:
        tree = measured_tree(drafter, target, num_nodes=nodes, depth=depth, top_k=4)
    shapes: dict[str, Shape] = {"chain": StaticTree.chain(depth), "tree": tree}
    recorder = Recorder()
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in drafter.parameters()), "training": config["extra"]}
    for kind, shape in shapes.items():
        rule = recorder if kind == "chain" else rejection_sampling
        settings = EvaluationSettings(temperatures=TEMPERATURES, max_new_tokens=options.max_new_tokens)
        settings = replace(settings, shape=shape, rule=rule)
        evaluation = evaluate(target, drafter, prompts, settings)
        result[kind] = {"shape": str(shape), "results": [row.to_dict() for row in evaluation.results]}
    return result | {"acceptance_at_temperature_1": recorder.summary()}


def rows(measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table, a line per family, kind of draft and temperature."""
    lines = []
    for name, result in measured.items():
        for kind in ("chain", "tree"):
            for row in result[kind]["results"]:
                low, high = row["acceptance_length_interval"]
                lines.append(
                    [
                        name,
                        f"{result['parameters'] / 1e6:.2f} M",
                        result[kind]["shape"],
                        f"{row['temperature']:g}",
                        f"{row['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]",
                        f"{row['cost_ratio']:.2f}",
                        f"{row['speedup']:.2f}",
                        {True: "yes", False: "NO", None: "–"}[row["lossless"]],
                    ]
                )
    return lines


def theory(measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Accepted first tokens of sampled chains at temperature 1 beside 1 - TV."""
    lines = []
    for name, result in measured.items():
        found = result["acceptance_at_temperature_1"]
        gap = found["accepted"] - found["one_minus_tv"]
        lines.append(
            [
                name,
                f"{found['rounds']}",
                f"{found['one_minus_tv']:.3f}",
                f"{found['accepted']:.3f}",
                f"{gap:+.3f} ± {found['half_width']:.3f}",
            ]
        )
    return lines


THEORY = ("family", "rounds", "mean 1 - TV", "accepted", "difference (95 %)")


@exit_on_user_error
def main() -> None:
    """Parse options, train, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--target", default="tiny", help="an option of conf/target (default tiny)")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more for train.py")
    parser.add_argument("--benchmark", default="python-stdlib", help="as evaluation.benchmark (default python-stdlib)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (default 128)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each (default 1000)")
    parser.add_argument("--limit", type=int, default=16, help="held-out prompts (default 16)")
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="K (default 5)")
    parser.add_argument("--num-nodes", type=int, default=16, help="nodes of the trees (default 16)")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "families", help="where the runs go")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/families.md as it is")
    options = parser.parse_args()

    measured = {}
    for name in options.families:
        run = train(name, options.target, options.steps, options.overrides, options.directory)
        measured[name] = measure(name, run, options)
        print_table(COLUMNS, rows(measured))
    print()
    print_table(THEORY, theory(measured))
    settings = {name: value for name, value in vars(options).items() if name not in ("directory", "no_docs")}
    mark = "families" if options.target == "tiny" else f"families_{options.target}"
    path = write_result(mark, settings, {"families": measured})
    if not options.no_docs:
        about = (
            f"{options.steps:,} steps each, {options.limit} prompts of {options.benchmark}, answers of up to "
            f"{options.max_new_tokens} tokens, float32 on a CPU; all figures in `benchmarks/results/{path.name}`."
        )
        put_into_page(PAGE, mark, about, [(COLUMNS, rows(measured)), (THEORY, theory(measured))])
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
