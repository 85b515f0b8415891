"""Draw the pictures of the pages: what each drafter reads and writes, and the house. Run it after changing one.

python docs/pictures.py [DIRECTORY]
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs import drafter_pictures
from docs.drawing import INK, Picture
from tests.architecture.graph import FLOORS, import_graph, module_files


def architecture() -> Picture:
    """The rooms of the package from the ground up, with their modules and the imports that leave them, both counted."""
    files, graph = module_files(), import_graph()
    p = Picture(720, 70 + 62 * len(FLOORS), "The rooms of specdraft; each imports only from those below it")
    p.text(40, 26, "commands compose conf/, build and run; train.py, evaluate.py and export open three", size=12)
    for number, floor in enumerate(reversed(FLOORS)):
        width = (640 - 20 * (len(floor) - 1)) // len(floor)
        for place, room in enumerate(floor):
            inside = [name for name in files if name.split(".")[1:2] == [room]]
            used = Counter(_room(other) for name in inside for other in graph[name] if _room(other) not in ("", room))
            modules = f"{len(inside)} modules" if len(inside) > 1 else "1 module"
            x, y = 40 + place * (width + 20), 42 + 62 * number
            most = ", ".join(f"{name} {count}" for name, count in used.most_common(width // 80))
            uses = bool(most) and width > 150
            p.box(x, y, width, 46, "")
            label = f"{room}, {modules}" if width > 150 else room
            p.text(x + width / 2, y + (20 if uses else 28), label, "middle", INK)
            if uses:
                p.text(x + width / 2, y + 37, f"imports {most}", "middle", size=11)
    p.text(
        40,
        62 + 62 * len(FLOORS),
        "imports NAME N: N imports of modules of that room, those for type checkers included",
        size=12,
    )
    return p


def _room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


PICTURES = {**drafter_pictures.PICTURES, "architecture": architecture}


def main() -> None:
    """Write every picture."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "images")
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
