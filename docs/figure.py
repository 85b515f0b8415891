"""Draw a training run as one SVG: what is really accepted while training, and position by position at the end.

python docs/figure.py RUN_DIRECTORY docs/images/run.svg
"""

import csv
import json
import sys
from pathlib import Path

WIDTH, HEIGHT, TOP, BOTTOM = 860, 300, 46, 250
BLUE, ORANGE, GREY = "#3b76b0", "#d9822b", "#7a7f87"  # told apart by people with any colour vision


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = 12, fill: str = GREY) -> str:
    """An SVG label."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{content}</text>'


def curves(rows: list[dict[str, str]]) -> list[str]:
    """Acceptance length over steps, really decoded and as validation with the true text before each token suggests."""
    series = {"really decoded, K = 5": ("acceptance_length", BLUE)}
    series["teacher-forced"] = ("validation/teacher_forced_acceptance_length", ORANGE)
    points = {
        label: [(int(row["step"]), float(row[key])) for row in rows if row.get(key)]
        for label, (key, _) in series.items()
    }
    last = max(step for values in points.values() for step, _ in values)
    high = max(value for values in points.values() for _, value in values) * 1.1
    left, right = 46, 420

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / last, BOTTOM - (BOTTOM - TOP) * (value - 1) / (high - 1)

    parts = [text(left, 24, "acceptance length while training", "start", 14)]
    for tick in (1, 1.5, 2, 2.5, 3, 3.5, 4):
        if tick <= high:
            y = place(0, tick)[1]
            parts.append(f'<path d="M{left} {y:.0f}H{right}" stroke="{GREY}" stroke-opacity=".25"/>')
            parts.append(text(left - 8, y + 4, f"{tick:g}", "end"))
    for number, (label, (_, colour)) in enumerate(series.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in [(0, 1.0), *points[label]]))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
            for x, y in (place(*p) for p in points[label])
        ]
        parts.append(text(right, BOTTOM - 14 - 18 * number, label, "end", fill=colour))
    parts.append(text((left + right) / 2, BOTTOM + 36, f"optimizer step (of {last})"))
    return parts


def bars(results: list[dict]) -> list[str]:
    """Conditional acceptance of each drafted position, at each temperature."""
    shown = [result for result in results if result["drafter"] == "eagle3"][:2]
    left, right = 500, 850
    parts = [text(left, 24, "accepted, given that the position was reached", "start", 14)]
    for tick in (0, 0.5, 1):
        y = BOTTOM - (BOTTOM - TOP) * tick
        parts.append(f'<path d="M{left} {y:.0f}H{right}" stroke="{GREY}" stroke-opacity=".25"/>')
        parts.append(text(left - 8, y + 4, f"{tick:.0%}", "end"))
    positions = len(shown[0]["conditional_acceptance_rate"])
    slot = (right - left) / positions
    for index, (result, colour) in enumerate(zip(shown, (BLUE, ORANGE), strict=False)):
        for position, rate in enumerate(result["conditional_acceptance_rate"]):
            x, height = left + slot * (position + 0.12 + 0.38 * index), (BOTTOM - TOP) * (rate or 0)
            size = f'width="{slot * 0.36:.0f}" height="{height:.0f}"'
            parts.append(f'<rect x="{x:.0f}" y="{BOTTOM - height:.0f}" {size} fill="{colour}"/>')
        label = f"temperature {result['temperature']:g}: acceptance length {result['acceptance_length']:.2f}"
        parts.append(text(left, BOTTOM + 36 + 17 * index - 8, label, "start", fill=colour))
    parts += [text(left + slot * (p + 0.5), BOTTOM + 14, str(p + 1)) for p in range(positions)]
    return parts


def main(run: Path, output: Path) -> None:
    """Read the run's ``metrics.csv`` and ``evaluation.json``."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = json.loads((run / "evaluation.json").read_text())["results"]
    body = "".join(curves(rows) + bars(results))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    output.write_text(f"{head}{body}</svg>\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
