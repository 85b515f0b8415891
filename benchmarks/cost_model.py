"""The cost model checked: predicted speedup of decoding against measured, for every K and tree that it predicts.

``python benchmarks/cost_model.py RUN...``: each drafter decodes the prompts once with the longest chain, from which all
others are predicted; then with every draft that was predicted, at batch size 1. Drafts and the timing of steps take
turns on every prompt, since other work on the machine slows passes over one token and over several differently.
"""

import argparse
import statistics
from typing import Any

from common import print_table, write_result
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.errors import exit_on_user_error
from specdraft.evaluation import CostSettings, EvaluationSettings, evaluate, load_prompts
from specdraft.targets import Target


def compare(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted beside measured, a row for each draft that is both."""
    measured = {(row["temperature"], row["draft"]): row for row in evaluation["checks"]}
    return [
        {
            "drafter": model["drafter"],
            "temperature": model["temperature"],
            "draft": row["draft"],
            "predicted_acceptance_length": row["acceptance_length"],
            "acceptance_length": found["acceptance_length"],
            "predicted": row["speedup"],
            "measured": found["speedup"],
            "error": row["speedup"] / found["speedup"] - 1,
        }
        for model in evaluation["cost_models"]
        for row in model["predictions"]
        if row["batch_size"] == 1 and (found := measured.get((model["temperature"], row["draft"]))) is not None
    ]


@exit_on_user_error
def main() -> None:
    """Parse options, evaluate, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="runs of train.py, or their drafter/")
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="the longest chain (default 5)")
    parser.add_argument("--limit", type=int, default=12, help="held-out prompts (default 12)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    options = parser.parse_args()

    compared: list[dict[str, Any]] = []
    evaluations = {}
    for run in options.runs:
        drafter, config = load_drafter(run)
        target = Target.load(config["target"]["name"], config["target"]["revision"], dtype="float32")
        check_target(config, target)
        settings = EvaluationSettings(
            num_draft_tokens=options.num_draft_tokens,
            temperatures=tuple(options.temperatures),
            max_new_tokens=options.max_new_tokens,
            samples=0,
        )
        cost = CostSettings(batch_sizes=(1,), check=True)
        prompts = load_prompts("python-stdlib", options.limit)
        evaluation = evaluate(target, drafter, prompts, settings, cost=cost).to_dict()
        name = evaluation["results"][0]["drafter"]
        evaluations[name] = {key: evaluation[key] for key in ("settings", "cost_models", "checks", "advice")}
        compared += compare(evaluation)
    rows = [
        [
            row["drafter"],
            f"{row['temperature']:g}",
            row["draft"],
            f"{row['predicted_acceptance_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"{100 * row['error']:+.1f} %",
        ]
        for row in compared
    ]
    print_table(
        ["drafter", "T", "draft", "tau, predicted", "measured", "speedup, predicted", "measured", "error"], rows
    )
    errors = [abs(row["error"]) for row in compared]
    within = sum(error <= 0.1 for error in errors)
    print(f"\nwithin 10 %: {within} of {len(errors)}; median error {100 * statistics.median(errors):.1f} %")
    summary = {"within_10_percent": within, "median_error": statistics.median(errors), "largest_error": max(errors)}
    settings_used = {name: value for name, value in vars(options).items() if name != "runs"}
    path = write_result("cost_model", settings_used, {**summary, "rows": compared, "drafters": evaluations})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
