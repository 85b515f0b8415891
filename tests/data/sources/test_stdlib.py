import ast
from pathlib import Path

import pytest

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS, Conversation
from specdraft.data.sources.stdlib import MAX_PROMPT_CHARACTERS, PythonStdlib, functions
from specdraft.errors import UserError


def prompt(conversation: Conversation) -> str:
    return conversation.prompt_messages[0]["content"]


def test_signature_and_docstring_ask_and_the_body_answers(library: Path) -> None:
    found = {c.id: c for c in PythonStdlib(root=str(library)).conversations("train")}
    path = next(path for path in stdlib.files(library) if stdlib.split_of(path) == "train")
    n = path.removeprefix("module_").removesuffix(".py")
    function, method = found[f"{path}:2:add_{n}"], found[f"{path}:9:count_{n}"]
    assert function.category == "function"
    assert function.prompt_messages == (
        {
            "role": "user",
            "content": f'def add_{n}(left, right):\n    """Return the sum of left and right, plus {n}."""',
        },
    )
    assert function.response == f"    total = left + right\n    return total + {n}"
    assert method.category == "method"
    assert prompt(method).startswith(f"def count_{n}(self, step):")


EVERYWHERE = """
def outer():
    'One.'
    if yes:
        def inner():
            'Two.'
            a = 1
            return a
    else:
        with open() as file:
            def other():
                'Three.'
                a = lambda: 1
                return a
    try:
        pass
    except Exception:
        async def handled():
            'Four.'
            a = 1
            return a
    else:
        def fine():
            'Five.'
            a = 1
            return a
    finally:
        def last():
            'Six.'
            a = 1
            return a
    return 1


class Case:
    match x:
        case 1:
            def matched(self):
                'Seven.'
                a = 1
                return a
"""


def test_functions_are_found_wherever_a_statement_may_stand_outermost_first():
    walked = [node.name for node in ast.walk(ast.parse(EVERYWHERE)) if hasattr(node, "args") and hasattr(node, "name")]
    assert [function.name for function in functions(EVERYWHERE, "a.py")] == walked and len(walked) == 7


def test_splits_share_no_file_and_no_prompt(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "library"
    copy.mkdir()
    by_split = {split: [p for p in stdlib.files(library) if stdlib.split_of(p) == split] for split in SPLITS}
    for path in stdlib.files(library):
        (copy / path).write_text((library / path).read_text())
    twin = by_split["validation"][0]
    (copy / twin).write_text((library / by_split["train"][0]).read_text())
    splits = {split: PythonStdlib(root=str(copy)).conversations(split) for split in SPLITS}
    prompts = {split: {prompt(c) for c in found} for split, found in splits.items()}
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["train"] & prompts["test"]
    assert len(splits["validation"]) == 2 * (len(by_split["validation"]) - 1)
    assert all(stdlib.split_of(c.id.split(":")[0]) == split for split, found in splits.items() for c in found)


def test_a_limit_takes_a_fair_prefix_of_a_fixed_order(library: Path) -> None:
    source = PythonStdlib(root=str(library))
    everything = source.conversations("train")
    assert list(source.conversations("train", 20)) == everything[:20]
    assert [c.id for c in everything] != sorted(c.id for c in everything)
    share = sum(c.category == "method" for c in everything[:60]) / 60
    assert 0.3 < share < 0.7


def test_test_suites_are_left_out_unless_asked_for(library: Path, tmp_path: Path) -> None:
    for folder in ("", "test"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in stdlib.files(library):
            (tmp_path / folder / path).write_text((library / path).read_text().replace("sum", f"sum{folder}"))
    without = PythonStdlib(root=str(tmp_path)).conversations("train")
    with_tests = PythonStdlib(root=str(tmp_path), include_tests=True).conversations("train")
    assert not any(c.id.startswith("test/") for c in without)
    assert any(c.id.startswith("test/") for c in with_tests)


def test_evaluation_prompts_leave_room_for_an_answer(library: Path, tmp_path: Path) -> None:
    for path in stdlib.files(library):
        text = (library / path).read_text()
        (tmp_path / path).write_text(text.replace("Return the sum", "Return the sum. " + "x" * MAX_PROMPT_CHARACTERS))
    prompts = PythonStdlib(root=str(tmp_path)).prompts("train")
    assert prompts
    assert {c.category for c in prompts} == {"method"}


def test_the_interpreters_own_library_has_every_split() -> None:
    source = PythonStdlib()
    assert len(source.conversations("train")) > 2000
    assert len(source.prompts("test")) > 100
    assert {c.category for c in source.prompts("validation", 50)} == {"function", "method"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("dev", None), "split 'dev' is unknown"), (("train", 0), "limit of conversations is 0")],
)
def test_bad_requests_are_refused(library: Path, arguments: tuple[str, int | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PythonStdlib(root=str(library)).conversations(*arguments)


def test_a_folder_without_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no documented functions"):
        PythonStdlib(root=str(tmp_path)).conversations("train")
    with pytest.raises(UserError, match="does not exist"):
        PythonStdlib(root=str(tmp_path / "nowhere")).conversations("train")


@pytest.fixture
def parses(monkeypatch, tmp_path):
    """How many files were parsed, with an empty cache on disk; of the library, three files."""
    calls: list[str] = []

    def counted(source: str, path: str):
        calls.append(path)
        return functions(source, path)

    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stdlib, "functions", counted)
    monkeypatch.setattr(stdlib, "files", lambda root=None: ["ast.py", "json/decoder.py", "textwrap.py"])
    stdlib._all_functions.cache_clear()
    yield calls
    stdlib._all_functions.cache_clear()


def test_the_library_is_parsed_once_for_all_runs(parses, tmp_path):
    first = stdlib._all_functions(None, False)
    stdlib._all_functions.cache_clear()  # another run
    assert stdlib._all_functions(None, False) == first and len(parses) == 3
    (kept,) = (tmp_path / "cache" / "python-stdlib").iterdir()
    kept.write_text("[[1]]")  # damaged
    stdlib._all_functions.cache_clear()
    assert stdlib._all_functions(None, False) == first and len(parses) == 6


def test_a_cache_that_cannot_be_written_costs_time_alone(parses, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert stdlib._all_functions(None, False) and len(parses) == 3
