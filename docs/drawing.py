"""Boxes, arrows and labels as an SVG file: what the pictures of the pages are drawn with."""

from html import escape

FILL = {"frozen": "#dbe4ee", "trained": "#fbe3c2", "token": "#ffffff", "note": "none"}
LINE = {"frozen": "#4a6785", "trained": "#b26a00", "token": "#7a7f87", "note": "none"}
INK, GREY = "#1c2330", "#7a7f87"


class Picture:
    """Boxes and arrows on a light ground that is legible in light and dark pages alike."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, label: str, kind: str = "frozen") -> None:
        """A box; lines of its label are separated by a newline. Trained boxes have a thick border."""
        stroke = 2.5 if kind == "trained" else 1
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{FILL[kind]}" stroke="{LINE[kind]}" '
            f'stroke-width="{stroke}"/>'
        )
        lines = label.split("\n")
        first = y + h / 2 + 5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + w / 2, first + 16 * number, line, "middle", INK)

    def text(self, x: float, y: float, label: str, anchor: str = "start", fill: str = GREY, size: int = 13) -> None:
        """A label of its own."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escape(label)}</text>'
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        """A line through the points, with a head at the last."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole picture."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(self.title)}</title>{head}'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#f7f8fa"/>{"".join(self.parts)}</svg>\n'
        )
