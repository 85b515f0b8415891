"""Draw a training run as one SVG: what is really accepted while training, and position by position at the end.

python docs/figure.py RUN_DIRECTORY docs/images/run.svg
"""

import csv
import json
import sys
from pathlib import Path

WIDTH, HEIGHT, TOP, BOTTOM = 860, 370, 96, 306
BLUE, ORANGE, GREY = "#2f6ca8", "#b8600b", "#4f5969"  # told apart by people with any color vision


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = 15, fill: str = GREY) -> str:
    """An SVG label."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{content}</text>'


def heading(x: float, title: str, names: list[str]) -> list[str]:
    """A panel's title, and under it the names of its series."""
    parts = [text(x, 36, title, "start", 18, "#1c2330")]
    for number, (name, color) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
        left = x + 170 * number
        parts.append(f'<rect x="{left:.0f}" y="52" width="12" height="12" fill="{color}"/>')
        parts.append(text(left + 18, 63, name, "start"))
    return parts


def level(left: float, right: float, y: float, label: str) -> list[str]:
    """A line of the grid."""
    line = f'<path d="M{left} {y:.0f}H{right}" stroke="{GREY}" stroke-opacity=".25"/>'
    return [line, text(left - 8, y + 5, label, "end")]


def curves(rows: list[dict[str, str]]) -> list[str]:
    """Acceptance length over steps, really decoded and as validation with the true text before each token suggests."""
    names = ("acceptance_length", "validation/teacher_forced_acceptance_length")
    series = [[(int(row["step"]), float(row[name])) for row in rows if row.get(name)] for name in names]
    last = max(step for points in series for step, _ in points)
    high = max(value for points in series for _, value in points) * 1.06
    left, right = 64, 410

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / last, BOTTOM - (BOTTOM - TOP) * (value - 1) / (high - 1)

    parts = heading(left, "Acceptance length while training", ["really decoded", "teacher-forced"])
    for tick in (tick / 2 for tick in range(2, 20) if tick / 2 <= high):
        parts += level(left, right, place(0, tick)[1], f"{tick:g}")
    for points, color in zip(series, (BLUE, ORANGE), strict=True):
        places = [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="3"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>' for x, y in places]
    parts += [text(place(step, 1)[0], BOTTOM + 22, f"{step:,}") for step in sorted({step for step, _ in series[0]})]
    parts.append(text((left + right) / 2, BOTTOM + 46, "optimizer step"))
    return parts


def bars(results: list[dict]) -> list[str]:
    """Conditional acceptance of each drafted position, at each temperature."""
    drafter = results[0]["drafter"]
    shown = [result for result in results if result["drafter"] == drafter][:2]
    left, right = 490, 836
    names = [f"T = {result['temperature']:g}: length {result['acceptance_length']:.2f}" for result in shown]
    parts = heading(left, "Accepted, where reached", names)
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts += level(left, right, BOTTOM - (BOTTOM - TOP) * tick, f"{tick:.0%}")
    positions = len(shown[0]["conditional_acceptance_rate"])
    slot = (right - left) / positions
    for index, (result, color) in enumerate(zip(shown, (BLUE, ORANGE), strict=True)):
        for position, rate in enumerate(result["conditional_acceptance_rate"]):
            x, height = left + slot * (position + 0.12 + 0.39 * index), (BOTTOM - TOP) * (rate or 0)
            size = f'width="{slot * 0.36:.0f}" height="{height:.0f}"'
            parts.append(f'<rect x="{x:.0f}" y="{BOTTOM - height:.0f}" {size} fill="{color}"/>')
    parts += [text(left + slot * (p + 0.5), BOTTOM + 22, str(p + 1)) for p in range(positions)]
    parts.append(text((left + right) / 2, BOTTOM + 46, "position in the draft"))
    return parts


def main(run: Path, output: Path) -> None:
    """Read the run's ``metrics.csv`` and ``evaluation.json``."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = json.loads((run / "evaluation.json").read_text())["results"]
    # A light ground, legible in light and dark pages alike.
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#f7f9fb"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    output.write_text(f"{head}{ground}{''.join(curves(rows) + bars(results))}</svg>\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
