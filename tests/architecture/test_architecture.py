"""The house rules that a machine can check: floors, circles, sizes, a test file for each module."""

from tests.architecture.graph import (
    DOORS,
    FLOORS,
    GROUPS,
    PACKAGE,
    REPOSITORY,
    circles,
    floor,
    import_graph,
    imports,
    module_files,
    rooms_graph,
    yaml_arrows,
)

LONGEST_FILE, LONGEST_PACKAGE = 300, 35_800
_FAMILIES = "tests/export/test_families.py asks every engine for every family"
_MODEL = "tests/evaluation/speedup/test_model.py: advice and step times are read with the model"
# Modules without a test file of their own, and why.
UNTESTED = {
    **dict.fromkeys(("dflash", "dspark", "draft_model", "eagle1", "medusa"), _FAMILIES),
    **dict.fromkeys(("model_card", "engine", "layout", "tensorrt_llm", "transformers", "vllm"), _FAMILIES),
}
UNTESTED = {f"specdraft.export.{name}": reason for name, reason in UNTESTED.items()} | {
    "specdraft.export.recurrent_drafting": _FAMILIES,
    "specdraft.export.redrafter": "tests/export/importing/test_redrafter.py: what is written is read back",
    "specdraft.export.importing.shared": "tests/export/importing: every reader of layers asks it",
    "specdraft.export.importing.head": "tests/export/importing: every reader is asked through it",
    "specdraft.commands.export": "tests/export/test_export_command.py: beside the checkpoints that it exports",
    "specdraft.drafters.eagle.borrowed_head": "tests/drafters/eagle/test_head.py asks every head of the family",
    "specdraft.evaluation.evaluation": "tests/evaluation/test_evaluator.py: it holds what the evaluator gives",
    **{f"specdraft.evaluation.speedup.{name}": _MODEL for name in ("advice", "measure", "step_times")},
}


def room_of(module: str) -> str:
    """The part of the package that a module lies in; doors belong to the commands that they open."""
    return "commands" if module in DOORS else module.split(".")[1]


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Arrows to another room that is not below."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if "." in module and "." in other and module not in DOORS
        if room_of(module) != room_of(other) and floor(room_of(module)) <= floor(room_of(other))
    ]


def test_every_module_has_a_floor_and_every_floor_its_modules():
    rooms = {room_of(module) for module in module_files() if "." in module}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_nothing_imports_upwards():
    assert upward(import_graph()) == []


def test_no_module_imports_itself_through_others():
    assert circles(import_graph()) == []


def test_no_package_imports_itself_through_others():
    assert {package: found for package, graph in rooms_graph().items() if (found := circles(graph))} == {}


def test_no_configuration_names_what_lies_above_it():
    arrows = yaml_arrows()
    rooms = {file: GROUPS[file.split("/")[0]] if "/" in file else "commands" for file, _ in arrows}
    assert [(file, module) for file, module in sorted(arrows) if floor(rooms[file]) < floor(room_of(module))] == []
    folders = {path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir()}
    assert folders == set(GROUPS)


def test_nobody_imports_a_door():
    assert [module for module, others in import_graph().items() if others & DOORS] == []


def test_the_lint_sees_what_it_forbids():
    """Each rule on a graph that breaks it."""
    files = module_files()
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from specdraft.training.module import DrafterModule\n"
        "def late():\n    import specdraft.data.packing as packing\n    from specdraft.losses import divergence\n"
        "from specdraft.errors import UserError\nimport torch\n"
    )
    found = imports(source, files)
    assert found == {
        "specdraft.training.module",
        "specdraft.data.packing",
        "specdraft.losses.divergence",
        "specdraft.errors",
    }
    assert upward({"specdraft.drafters.base": found}) == [
        "specdraft.drafters.base imports specdraft.data.packing",
        "specdraft.drafters.base imports specdraft.training.module",
    ]
    assert upward({"specdraft.losses.chunked": {"specdraft.decoding.tree"}})  # side by side
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert ("data/conversations.yaml", "specdraft.data.datamodule") in yaml_arrows()  # a nested name, a class method


def test_no_file_is_long():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in module_files().values()}
    assert {str(path): length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_the_package_is_small():
    total = sum(len(path.read_text("utf-8").splitlines()) for path in module_files().values())
    assert total <= LONGEST_PACKAGE


def test_every_module_has_a_test_file_of_its_name():
    missing = set()
    for module, path in module_files().items():
        if path.name == "__init__.py" or module in DOORS:
            continue
        relative = path.relative_to(PACKAGE)
        if not (REPOSITORY / "tests" / relative.with_name(f"test_{relative.name}")).exists():
            missing.add(module)
    assert missing == set(UNTESTED)
