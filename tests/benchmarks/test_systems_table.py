"""Runs of several systems become one table: of the same prompts alone, each system once, the best marked."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = "before\n<!-- here: begin -->\nold\n<!-- here: end -->\nafter\n"


@pytest.fixture
def table(monkeypatch, tmp_path):
    """table(words...) -> the page. Its runs are ONE.json and TWO.json in the folder ``table.folder``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import systems_table

    page = tmp_path / "page.md"
    monkeypatch.setattr(systems_table, "PAGE", page)

    def call(*words):
        page.write_text(PAGE)
        monkeypatch.setattr(sys, "argv", ["systems_table.py", "here", *words])
        systems_table.main()
        return page.read_text()

    call.folder = tmp_path
    return call


def write(path, systems, **settings):
    usual = {"target": "t", "dtype": "float32", "prompts": "p.jsonl", "turns": 1, "max_new_tokens": 32}
    found = [
        {
            "system": name,
            "temperature": temperature,
            "acceptance_length": {"all": length, "math_reasoning": length + 1},
            "speedup": 1.5,
            "speedup_interval": [1.0, 2.0],
            "extra_bytes": 2e6,
        }
        for name, temperature, length in systems
    ]
    content = {"settings": usual | {"num_draft_tokens": 5} | settings, "prompts": 7, "found": found}
    path.write_text(json.dumps(content | {"categories": ["all", "math_reasoning"]}))
    return str(path)


def test_the_later_run_counts_and_what_was_not_measured_is_a_dash(table):
    one = write(table.folder / "one.json", [("a", 0.0, 1.1), ("b", 0.0, 1.2), ("c", 0.0, 1.3)])
    two = write(table.folder / "two.json", [("a", 0.0, 1.4), ("a", 1.0, 1.6)])
    page = table(one, two, "--without", "c")
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert "|  | accepted, T = 0 | speed | accepted, T = 1 | speed | extra MB |" in page
    assert "| a | 1.40 | 1.50 [1.00, 2.00] | 1.60 | 1.50 [1.00, 2.00] | 2.0 |" in page
    assert "| b | 1.20 | 1.50 [1.00, 2.00] | – | – | 2.0 |" in page and "| c |" not in page
    assert "7 prompts of `p.jsonl`" in page and "`one.json`, `two.json` of `benchmarks/results/`" in page


def test_by_kind_the_most_accepted_first_and_the_best_marked(table):
    one = write(table.folder / "one.json", [("a", 0.0, 1.1), ("b", 0.0, 1.2), ("b", 1.0, 1.3)])
    page = table(one, "--kinds")
    assert "| T = 0 | all | math reasoning | extra MB |" in page and "| T = 1 | all |" in page
    assert "| b | **1.20** | **2.20** | 2.0 |\n| a | 1.10 | 2.10 | 2.0 |" in page


def test_runs_of_other_prompts_are_refused(table, capsys):
    one = write(table.folder / "one.json", [("a", 0.0, 1.1)])
    two = write(table.folder / "two.json", [("a", 0.0, 1.4)], max_new_tokens=64)
    with pytest.raises(SystemExit):
        table(one, two)
    assert "max_new_tokens=32, another 64: expected runs of the same prompts" in capsys.readouterr().err
