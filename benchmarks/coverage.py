"""How often do intervals over few prompts hold the truth? ``python benchmarks/coverage.py`` simulates it.

Per-prompt acceptance as evaluations see it: every prompt has its own acceptance rate (beta-distributed: rounds of a
prompt resemble each other) and its own length (gamma-distributed, at most 128 tokens: rounds per prompt vary). The
truth is the acceptance length over very many such prompts. Compared are the interval of
``specdraft.evaluation.bootstrap`` and the percentiles of resampled values. Writes a dated JSON.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from common import print_table, write_result
from specdraft.evaluation.bootstrap import bootstrap_interval

LENGTH, K = 128, 5


@dataclass(frozen=True)
class Profile:
    """Beta parameters of a prompt's acceptance rate; shape and mean of its length in tokens."""

    alpha: float
    beta: float
    shape: float
    mean: float = 60.0


PROFILES = {
    "alike": Profile(12.0, 8.0, 6.0),
    "ordinary": Profile(6.0, 4.0, 3.0),
    "varied": Profile(3.0, 2.5, 1.5),
    "extreme": Profile(1.2, 1.5, 1.0),
}


def draw(profile: Profile, samples: int, prompts: int, generator: torch.Generator) -> Tensor:
    """``[samples, prompts, 2]``: accepted tokens and rounds of every prompt."""
    shape = (samples, prompts)
    a, b, lengths = (
        torch._standard_gamma(torch.full(shape, value, dtype=torch.float64), generator)
        for value in (profile.alpha, profile.beta, profile.shape)
    )
    rate = a / (a + b)
    tokens = (2 + lengths * profile.mean / profile.shape).clamp(max=LENGTH)
    accepted, rounds, emitted = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    while bool((going := emitted < tokens).any()):
        chances = torch.rand(*shape, K, generator=generator, dtype=torch.float64) < rate[..., None]
        new = chances.double().cumprod(-1).sum(-1) * going
        accepted, rounds, emitted = accepted + new, rounds + going, emitted + (1 + new) * going
    return torch.stack([accepted, rounds], dim=-1)


def acceptance_length(sums: Tensor) -> Tensor:
    """``[R, 2] -> [R]``."""
    return 1 + sums[:, 0] / sums[:, 1]


def percentiles(columns: Tensor, resamples: int, seed: int) -> tuple[float, float]:
    """The percentile interval (Efron 1979)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(columns), (resamples, len(columns)), generator=generator)
    values = acceptance_length(columns[drawn].sum(1))
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def coverage(profile: Profile, prompts: int, samples: int, resamples: int = 1000, seed: int = 0) -> dict[str, float]:
    """Share of the samples whose 95 % interval holds the truth, by method, and the interval's median width."""
    generator = torch.Generator().manual_seed(seed)
    truth = float(acceptance_length(draw(profile, 1, 200_000, generator).sum(1)))
    found: dict[str, list[tuple[float, float]]] = {"bootstrap-t": [], "percentile": []}
    for number, columns in enumerate(draw(profile, samples, prompts, generator)):
        bounds = (1.0, 1.0 + K)
        interval = bootstrap_interval(columns, acceptance_length, resamples=resamples, seed=number, bounds=bounds)
        assert interval is not None
        found["bootstrap-t"].append(interval)
        found["percentile"].append(percentiles(columns, resamples, number))
    result = {}
    for name, intervals in found.items():
        ends = torch.tensor(intervals, dtype=torch.float64)
        result[name] = float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).double().mean())
        result[f"{name} width"] = float((ends[:, 1] - ends[:, 0]).median())
    return result


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 8, 16, 40])
    parser.add_argument("--samples", type=int, default=2500)
    parser.add_argument("--resamples", type=int, default=1000)
    options = parser.parse_args()
    rows: list[dict[str, float | int | str]] = []
    for name, profile in PROFILES.items():
        for prompts in options.prompts:
            found = coverage(profile, prompts, options.samples, options.resamples)
            rows.append({"profile": name, "prompts": prompts, **found})
    names = list(rows[0])
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    print_table(names, cells)
    settings = {"samples": options.samples, "resamples": options.resamples, "max_tokens": LENGTH, "num_draft_tokens": K}
    print(write_result("coverage", settings, {"rows": rows}))


if __name__ == "__main__":
    main()
