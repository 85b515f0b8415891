"""Which module of specdraft imports which, type-checking imports and the ``_target_`` entries of conf/ included."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "specdraft"

# The ground floor first. What shares a floor stands side by side: neither imports the other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("allocation", "attention", "errors", "text", "threads"),
    ("files", "http_client", "leftovers", "onednn", "redaction", "rendering", "tensors"),
    ("entry", "cli"),
    ("losses", "decoding"),
    ("targets",),
    ("drafters",),
    ("data", "serving"),
    ("export",),
    ("evaluation",),
    ("training",),
    ("bench", "chat", "check", "doctor", "embedded", "forecast"),
    ("commands",),
)

# Modules to be run by ``python -m``: each only opens a command, and nobody imports it.
DOORS = {"specdraft.__main__"}

# conf/GROUP belongs to the package that composes it; conf/FILE.yaml to the command of that name.
GROUPS = {
    "callbacks": "training",
    "compare": "evaluation",
    "data": "data",
    "decoding": "evaluation",
    "drafter": "evaluation",
    "engine": "export",
    "experiment": "commands",
    "features": "data",
    "generator": "data",
    "logger": "training",
    "model": "training",
    "optimizer": "training",
    "recipe": "commands",
    "strategy": "training",
    "target": "targets",
    "trainer": "training",
}


def module_files() -> dict[str, Path]:
    """Every module of specdraft by its dotted name; a package is its ``__init__``."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def module_of(name: str, files: Mapping[str, Path]) -> str:
    """The longest prefix of a dotted name that is a module."""
    while name not in files:
        name = name.rpartition(".")[0]
    return name


def imports(source: str, files: Mapping[str, Path]) -> set[str]:
    """The modules of specdraft that a source file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {module_of(name, files) for name in names if name.partition(".")[0] == "specdraft"}
    return found


def import_graph() -> dict[str, set[str]]:
    """For each module those that it imports."""
    files = module_files()
    return {name: imports(path.read_text("utf-8"), files) - {name} for name, path in files.items()}


def rooms_graph() -> dict[str, dict[str, set[str]]]:
    """For each package the graph of the packages and modules right inside it; doors are left out."""
    graph = {name: others for name, others in import_graph().items() if name not in DOORS}
    packages = {name for name, path in module_files().items() if path.name == "__init__.py"}
    inside: dict[str, dict[str, set[str]]] = {}
    for package in sorted(packages):
        found: dict[str, set[str]] = {}
        for name, others in graph.items():
            if child := _child(package, name):
                found.setdefault(child, set()).update(filter(None, (_child(package, other) for other in others)))
        inside[package] = {child: others - {child} for child, others in found.items()}
    return inside


def _child(package: str, module: str) -> str:
    """``b`` of ``package.b.c``; nothing of a module that is not inside."""
    return module[len(package) + 1 :].partition(".")[0] if module.startswith(f"{package}.") else ""


def yaml_arrows() -> set[tuple[str, str]]:
    """(file under conf/, module that one of its ``_target_`` names)."""
    files = module_files()
    arrows = set()
    for path in sorted((REPOSITORY / "conf").rglob("*.yaml")):
        for target in _targets(yaml.safe_load(path.read_text("utf-8"))):
            if target.startswith("specdraft."):
                arrows.add((path.relative_to(REPOSITORY / "conf").as_posix(), module_of(target, files)))
    return arrows


def _targets(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("_target_"), str):
            yield value["_target_"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _targets(each)


def floor(room: str) -> int:
    """The number of a room's floor, 0 for the ground."""
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found
