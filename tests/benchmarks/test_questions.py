"""Questions that people wrote, as the files of their collections have them."""

import json

import pytest

from questions import LONGEST, T0, collect
from specdraft.data.sources.records import read_records

FILES = {
    "self-instruct/data/seed_tasks.jsonl": [{"instruction": "Name a bird.", "instances": [{"input": ""}]}],
    "self-instruct/human_eval/user_oriented_instructions.jsonl": [
        {"instruction": "Make this polite.", "instances": [{"input": "Go away."}]}
    ],
    "grade-school-math/grade_school_math/data/train.jsonl": [
        {"question": "Tom has 3 pens and buys 4 more at the shop. How many pens has he now?"},
        {"question": "Ann reads nine pages on every day of two long weeks in May. How many pages are these?"},
        {"question": "long " * LONGEST},
    ],
    f"{T0}/xsum_summarize_DOC.jsonl": [
        {"prompt": "Summarize: A bridge opened.\nSummary: "},
        {"prompt": "no such form"},
    ],
    f"{T0}/sciq_Direct_Question.jsonl": [
        {"prompt": f"Answer the following question given this paragraph: \n\nFact {n}...\n\n\nQ: Which {n}?\n\n\nA:\n"}
        for n in range(5)
    ],
    f"{T0}/trec_fine_grained_open.jsonl": [{"prompt": "What is this question asking for?\n\nWho was Abel ?\n"}],
}
GERMAN = "# sent_id = 1\n# text = Der Zug nach Hamburg hat heute eine Stunde Verspätung .\n1\tDer\n\n# text = Kurz.\n"


@pytest.fixture
def folder(tmp_path):
    for name, records in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    (tmp_path / "UD_German-GSD").mkdir()
    for part in ("dev", "test"):
        (tmp_path / "UD_German-GSD" / f"de_gsd-ud-{part}.conllu").write_text(GERMAN, encoding="utf-8")
    return tmp_path


def asked(found):
    return [message["content"] for each in found for message in each["messages"]]


def test_every_collection_is_read(folder):
    questions = set(asked(collect(folder, [])))
    assert questions >= {
        "Name a bird.",
        "Make this polite.\n\nGo away.",
        "Translate German to English: Der Zug nach Hamburg hat heute eine Stunde Verspätung .",
        "Who was Abel?",
        "Fact 0\nWhich 0?",  # behind one passage, two, three, and one again
        "Fact 0\nFact 1\nWhich 1?",
        "Fact 0\nFact 1\nFact 2\nWhich 2?",
        "Fact 3\nWhich 3?",
    }
    assert not any("..." in each or "Kurz" in each or len(each) > LONGEST for each in questions)


def test_what_a_benchmark_asks_is_left_out(folder):
    held_out = "He said: TOM has 3 pens, and buys 4 more at the shop. How many pens has he?"
    kept = asked(collect(folder, [held_out]))
    assert not any(each.startswith("Tom") for each in kept) and any(each.startswith("Ann") for each in kept)


def test_the_file_is_one_that_a_target_can_answer(folder, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in collect(folder, [])), encoding="utf-8")
    found = list(read_records(str(path), None, "train", streaming=False))
    assert found and not any(each.error for each in found)
