"""Questions as people ask them, from three collections that anyone may clone, for SmolLM2 to answer.

``python benchmarks/questions.py DIR OUT.jsonl``, where ``DIR`` holds clones of

- ``yizhongw/self-instruct`` (Apache-2.0): tasks that people wrote, and T0's tasks of reading and summing up,
- ``openai/grade-school-math`` (MIT): word problems, the training part,
- ``UniversalDependencies/UD_German-GSD`` (CC BY-SA 4.0): sentences to translate.

``OUT.jsonl`` is then what ``specdraft regenerate data.path=OUT.jsonl`` lets a target answer. Questions that share a run
of words with a benchmark's (``--without``) are left out.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specdraft.data.regeneration.questions import normalized
from specdraft.data.sources.records import read_lines
from specdraft.files import write_text

LONGEST = 4_000  # characters: some 900 tokens
SHARED_WORDS = 12  # in a row: then two texts have one origin
T0 = "self-instruct/data/finetuning/t0_train_50k/data_per_template"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [record.fields for record in read_lines(path)]


def _found(folder: Path, names: str, pattern: str) -> Iterator[dict[str, str]]:
    """The named groups of ``pattern`` in T0's prompts of the files ``names``; prompts without it are passed over."""
    for path in sorted((folder / T0).glob(names)):
        for line in _lines(path):
            if match := re.search(pattern, line["prompt"], re.DOTALL):
                yield {name: text.strip().removesuffix("...").strip('"') for name, text in match.groupdict().items()}


def _tasks(folder: Path) -> Iterator[str]:
    for name in ("data/seed_tasks.jsonl", "human_eval/user_oriented_instructions.jsonl"):
        for task in _lines(folder / "self-instruct" / name):
            text = task["instances"][0]["input"]
            yield task["instruction"] + (f"\n\n{text}" if text else "")


def _word_problems(folder: Path) -> Iterator[str]:
    for line in _lines(folder / "grade-school-math/grade_school_math/data/train.jsonl"):
        yield line["question"]


def _german(folder: Path) -> Iterator[str]:
    for path in ((folder / "UD_German-GSD" / f"de_gsd-ud-{part}.conllu") for part in ("dev", "test")):
        for sentence in re.findall(r"^# text = (.{30,})$", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"Translate German to English: {sentence}"


def _articles(folder: Path) -> Iterator[str]:
    for names, pattern in {
        "cnn_dailymail_3_0_0_news_summary.jsonl": r"article:\n\n(?P<text>.*)",
        "xsum_summarize_DOC.jsonl": r"Summarize: (?P<text>.*)",
        "multi_news_summarize.jsonl": r"Document: (?P<text>.*?)(?=\n\nDocument:|$)",
        "duorc_*RC_answer_question.jsonl": r"Movie plot: (?P<text>.*)",
        "samsum_Summarize_.jsonl": r"Summarize: (?P<text>.*)",
        "quoref_Given_Context_Answer_Question.jsonl": r"context below:\n\n(?P<text>.*)",
        "imdb_Movie_Expressed_Sentiment.jsonl": r"(?P<text>.*?)(?=The sentiment expressed|$)",
    }.items():
        for found in _found(folder, names, pattern):
            yield f"Summarize: {found['text']}"


def _passages(folder: Path) -> Iterator[str]:
    """Questions behind one to three passages, the last of which answers them."""
    for names, pattern in {
        "adversarial_qa_*_question_context_answer.jsonl": r"Question: (?P<question>.*?)\n\nContext: (?P<text>.*?)\n\n",
        "quoref_Given_Context_Answer_Question.jsonl": r"(?P<question>.*?)\n\nAnswer .*? below:\n\n(?P<text>.*)",
        "duorc_*RC_answer_question.jsonl": r"Question: (?P<question>.*?)\n.*Movie plot: (?P<text>.*)",
        "sciq_Direct_Question.jsonl": r"paragraph: \n\n(?P<text>.*)\n\n\nQ: (?P<question>.*?)\n",
    }.items():
        before: list[str] = []
        for found in _found(folder, names, pattern):
            text = found["text"]
            yield "\n".join([*before, text, found["question"]])
            before = [*before, text][-2:] if text not in before and len(before) < 2 else []


def _questions(folder: Path) -> Iterator[str]:
    for names, pattern in (
        ("trec_fine_grained_*.jsonl", r"(?P<question>[A-Z][^\n]*) \?"),
        ("glue_qqp_meaning.jsonl", r"Question 1: (?P<question>.*?)\n"),
        ("glue_qqp_meaning.jsonl", r"Question 2: (?P<question>.*?)\n"),
        ("wiki_qa_found_on_google.jsonl", r"Question: (?P<question>.*?)\n"),
        ("kilt_tasks_hotpotqa_straighforward_qa.jsonl", r"(?P<question>.*)"),
        ("sciq_Direct_Question_Closed_Book_.jsonl", r"Q: (?P<question>.*?)\n"),
        ("commonsense_qa_question_answering.jsonl", r"(?P<question>.*?)\n"),
    ):
        for found in _found(folder, names, pattern):
            yield re.sub(r"\?*$", "?", found["question"].split("?")[0])


KINDS: dict[str, tuple[Callable[[Path], Iterator[str]], int]] = {  # and how many of each
    "tasks": (_tasks, 600),
    "word problems": (_word_problems, 1_500),
    "German": (_german, 800),
    "articles": (_articles, 1_200),
    "passages": (_passages, 900),
    "questions": (_questions, 1_600),
}


def _runs(text: str) -> set[str]:
    words = normalized(text).split()
    return {" ".join(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))}


def collect(folder: Path, held_out: list[str]) -> Iterator[dict[str, Any]]:
    """Each kind's questions, shuffled, without those that repeat others or share words with a benchmark's."""
    taken = {run for text in held_out for run in _runs(text)}
    for kind, (read, most) in KINDS.items():
        texts = list(dict.fromkeys(text for text in read(folder) if len(text) <= LONGEST))
        random.Random(0).shuffle(texts)
        kept = [text for text in texts if taken.isdisjoint(_runs(text))][:most]
        print(f"{kind}: {len(kept):,} of {len(texts):,}")
        for text in kept:
            yield {"messages": [{"role": "user", "content": text}]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the three clones are")
    parser.add_argument("output", type=Path, help="the file to write, JSON Lines of messages")
    parser.add_argument(
        "--without", type=Path, nargs="*", default=[], help="benchmarks: JSON Lines with prompt or turns"
    )
    arguments = parser.parse_args()
    held_out = [
        text for path in arguments.without for line in _lines(path) for text in line.get("turns") or [line["prompt"]]
    ]
    found = list(collect(arguments.folder, held_out))
    random.Random(0).shuffle(found)
    write_text(arguments.output, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found))
    print(f"{len(found):,} questions -> {arguments.output}")


if __name__ == "__main__":
    main()
