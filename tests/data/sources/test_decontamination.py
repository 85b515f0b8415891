import json
from pathlib import Path

import pytest

from specdraft.data.prompts import STDLIB_LIMIT, benchmark_questions
from specdraft.data.sources.base import Conversation
from specdraft.data.sources.decontamination import Benchmark

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def chat(asks: str, answers: str = "yes") -> Conversation:
    return Conversation("FILE:1", "", ({"role": "user", "content": asks},), answers)


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        (chat("  Is it\n five?"), True),
        (chat("Is it fifty?"), False),
        (chat("Tell me: is it five?"), False),  # short questions count as wholes alone
        (chat(f"Count: {LONG.title()}."), True),
        (chat("Count!", f"Here: {LONG.replace(' ', ', ')}"), True),
        (chat(LONG.split(" ", 1)[1]), True),  # 13 words of it
        (chat(LONG.split(" ", 2)[2]), False),  # 12 words of it
        (Conversation("FILE:1", "", (), f"A document: {LONG}"), True),
        (Conversation("FILE:1", "", (), "A document"), False),
    ],
)
def test_a_question_or_thirteen_words_of_it(conversation: Conversation, expected: bool) -> None:
    assert Benchmark(["Is it five?", LONG]).overlaps(conversation) is expected
    assert not Benchmark([]).overlaps(conversation)


def test_the_questions_of_a_file_are_all_that_its_users_say(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": messages}]
    path = tmp_path / "benchmark.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert sorted(benchmark_questions(str(path))) == ["a", "b", "c", "user", "user"]
    assert benchmark_questions(str(path), own=str(path)) == []


def test_the_standard_librarys_questions_are_all_of_them() -> None:
    assert len(benchmark_questions("python-stdlib")) > STDLIB_LIMIT
