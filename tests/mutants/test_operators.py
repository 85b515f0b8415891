import ast
from textwrap import dedent

import pytest

from tests.mutants.operators import diff, mutants


def changes(source: str) -> set[str]:
    return {mutant.after for mutant in mutants(dedent(source))}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a + b", {"return a - b", "return (a)"}),
        ("return a * b", {"return a / b", "return (a)", "return (b)"}),
        ("return a < b", {"return (a <= b)", "return (a >= b)"}),
        ("return 0 < a <= b", {"return (0 <= a <= b)", "return (0 < a < b)", "return 1 < a <= b"}),
        ("return a and not b", {"return (a or not b)", "return a and (b)"}),
        ("return a.sum(-1)", {"return a.sum(0)", "return a.sum(-2)"}),
        ("return a[b:]", {"return a[b + 1:]"}),
        ("return a[1:]", {"return a[2:]"}),
        ("return a.clamp(min=0.0)", {"return (a)", "return a.clamp(max=0.0)", "return a.clamp(min=1.0)"}),
        ("return b if a else c", {"return (b if not a else c)"}),
        ("a += 1", {"pass", "a -= 1", "a += 2"}),
        ("a = b.mul_(c)", {"pass", "a = (b)"}),
        ("c = b", set()),  # without it the name would not be there
        ("a.mul_(b)", {"pass", "(a)"}),
        ("raise ValueError(f'{a + 1}')", {"pass"}),
        ("return zip(a, b, strict=True)", set()),
        ("assert a < 1", set()),
        ("return isinstance(a, int | float)", set()),
        ("return f'{a + 1}' + 'b'", set()),
    ],
)
def test_every_operator(line, expected):
    assert changes(f"def f(a, b):\n    {line}\n") == expected


def test_branches_loops_and_defaults():
    source = '''
        """About 1 thing."""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import torch
        SIZE: int = 3

        class A:
            b: int | None = 4

            def f(self, c: bool = True) -> None:
                """About 2 things."""
                for x in range(5):
                    if c:
                        continue
                    else:
                        self.x = x
    '''
    found = {mutant.key: mutant.at_import for mutant in mutants(dedent(source))}
    assert found == {
        ("", "SIZE: int = 3", "SIZE: int = 4"): True,
        ("A", "b: int | None = 4", "b: int | None = 5"): True,
        ("A.f", "def f(self, c: bool = True) -> None:", "def f(self, c: bool = False) -> None:"): True,
        ("A.f", "for x in range(5):", "for x in range(6):"): False,
        ("A.f", "if c:", "if not (c):"): False,
        ("A.f", "if c: continue", "if c: pass"): False,
        ("A.f", "if c: continue", "if c: break"): False,
        ("A.f", "self.x = x", "pass"): False,
    }


def test_a_mutant_is_the_whole_file_with_one_change():
    source = "def f(a):\n    return (\n        a\n        + 1\n    )  # why\n\n\nX = 'ü' * 2\n"
    for mutant in mutants(source):
        ast.parse(mutant.source)
        assert mutant.source != source
    first = next(mutant for mutant in mutants(source) if "a - 1" in mutant.after)
    assert first.source == "def f(a):\n    return (\n        a - 1\n    )  # why\n\n\nX = 'ü' * 2\n"
    assert list(first.lines) == [3, 4]
    assert diff(source, first, "f.py") == "@@ -3,2 +3 @@\n-        a\n-        + 1\n+        a - 1"
    assert "X = 'ü' * 3" in {mutant.source.splitlines()[-1] for mutant in mutants(source)}
