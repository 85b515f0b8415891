"""From conversations to packed sequences: streamed, by several processes, kept on disk."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedTokenizerFast

from specdraft.data.datamodule import DataModule
from specdraft.data.packing import pack
from specdraft.data.preparation import Preparation
from specdraft.data.sources.self_written import SelfWritten
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.chat import example_from_words
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.data.written import files, messages, module, same, write


def sharegpt(n: int) -> dict[str, Any]:
    turns = [(role, f"{role} {n} {k}") for k in range(n % 3 + 1) for role in ("human", "gpt")]
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n}", "response": f"return {n}"}


def text(n: int) -> dict[str, Any]:
    return {"text": f"def add_{n}(step):\n    return step + {n}\n" * (n % 5 + 1)}


@pytest.mark.parametrize("record", [messages, sharegpt, pair, text])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_streamed_is_what_lists_in_memory_give(
    target: Target, tmp_path: Path, record: Callable[[int], dict[str, Any]], suffix: str
) -> None:
    records, path = [record(n) for n in range(150)], str(tmp_path / f"a.{suffix}")
    if suffix == "jsonl":
        write(Path(path), records)
    else:
        Dataset.from_list(records).to_parquet(path)
    data = module(path, tmp_path)
    data.prepare(target)
    for split in ("train", "validation"):
        found = list(data.preparation.source.conversations(split))
        expected, report = pack([example_from_words(target.tokenizer, c, target.eos_token_ids) for c in found], 64)
        assert same(data.packed[split].whole(), expected)
        assert data.about(split).items() >= vars(report).items()
    learned = data.packed["train"].whole()
    assert torch.equal(
        data.response_counts,
        torch.bincount(learned.input_ids[learned.loss_mask], minlength=target.vocab_size),
    )


def test_the_number_of_processes_changes_nothing(target: Target, library: Path, tmp_path: Path) -> None:
    made = []
    for processes in (1, 2, 3):
        source = PythonStdlib(root=str(library))
        data = DataModule(
            source, regenerate=False, sequence_length=128, num_proc=processes, cache_dir=str(tmp_path / str(processes))
        )
        data.prepare(target)
        assert len(source.conversations("train")) > 2 * 64  # several chunks
        made.append(data)
    for data in made[1:]:
        assert data.about("train") == made[0].about("train")
        assert same(data.packed["train"].whole(), made[0].packed["train"].whole())
    contents = [files(tmp_path / str(n), "tokens.bin") for n in (1, 2, 3)]
    assert len({tuple(file.read_bytes() for file in found) for found in contents}) == 1


def test_a_second_run_prepares_nothing_and_other_data_is_prepared(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [messages(n) for n in range(60)]
    first = module(write(tmp_path / "a.jsonl", records), tmp_path)
    first.prepare(target)
    assert len(files(tmp_path, "index.json")) == 2
    # What is said decides, not the file.
    moved = module(write(tmp_path / "b.jsonl", records[::-1]), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("specdraft.data.preparation.tokenized", None)
        moved.prepare(target)
    assert same(moved.packed["train"].whole(), first.packed["train"].whole())
    assert moved.about("train") == first.about("train")
    asked = first.preparation.source.conversations("train")[3].prompt_messages[0]["content"]
    others = [
        module(write(tmp_path / "c.jsonl", [messages(n) for n in range(70)]), tmp_path),
        module(str(tmp_path / "a.jsonl"), tmp_path, benchmark=[asked]),
        module(str(tmp_path / "a.jsonl"), tmp_path, limit=20),
    ]
    prints = {first.about("train")["fingerprint"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in others:
            other.prepare(target)
            prints.add(other.about("train")["fingerprint"])
    assert len(prints) == 4
    longer = module(str(tmp_path / "a.jsonl"), tmp_path, sequence_length=128)
    before = len(files(tmp_path, "index.json"))
    longer.prepare(target)
    assert len(files(tmp_path, "index.json")) == before  # sequences of another length are of the same examples
    assert longer.about("train")["fingerprint"] not in prints


TEMPLATE = (  # without generation marks, and it refuses what one of the conversations asks
    "{% for m in messages %}{% if 'refuse' in m.content %}{{ raise_exception('no such words') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def picky(target: Target, tokenizer: PreTrainedTokenizerFast) -> Iterator[Target]:
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    yield target
    tokenizer.chat_template = before


def with_refused(folder: Path, lines: tuple[int, ...]) -> str:
    records = [messages(n) for n in range(100)]
    for line in lines:
        records[line - 1]["messages"][0]["content"] += " refuse"
    return write(folder / "a.jsonl", records)


def lines_of(data: DataModule, split: str, lines: tuple[int, ...]) -> list[str]:
    return [c.id for c in data.preparation.source.conversations(split) if int(c.id.split(":")[-1]) in lines]


def test_conversations_without_a_safe_mask_are_named_by_line_and_skipped(picky: Target, tmp_path: Path) -> None:
    lines = (4, 17, 58, 99)
    path = with_refused(tmp_path, lines)
    for attempt in range(2):  # the second finds it prepared, and says the same
        data = module(path, tmp_path, max_malformed=4)
        with pytest.warns(UserWarning, match="have no safe loss mask and are skipped") as caught:
            data.prepare(picky)
        said = " ".join(str(warning.message) for warning in caught)
        named = lines_of(data, "train", lines)
        assert len(named) >= 2
        assert f"{len(named)} of {len(data.preparation.source.conversations('train'))} train conversations" in said, (
            attempt
        )
        assert f"({', '.join(named)}): {named[0]}: the target's chat template cannot render" in said
        assert data.about("train")["unsafe"] == len(named)
        assert data.about("train")["documents"] == len(data.preparation.source.conversations("train")) - len(named)


def test_too_many_stop_the_run_with_their_number(picky: Target, tmp_path: Path) -> None:
    lines = (4, 17, 58, 99)
    data = module(with_refused(tmp_path, lines), tmp_path, max_malformed=1)
    named = lines_of(data, "train", lines)
    with pytest.raises(UserError, match=r"of the first \d+ train .*max_malformed is 1: .*no such words") as caught:
        data.prepare(picky)
    assert f"{len(named)} of the first" in str(caught.value)
    assert f"({', '.join(named)})" in str(caught.value)
    assert not files(tmp_path, "index.json")


def test_a_template_that_never_gives_a_mask_shows_the_row(picky: Target, tmp_path: Path) -> None:
    data = module(with_refused(tmp_path, tuple(range(1, 101))), tmp_path)
    first = data.preparation.source.conversations("train")[0].id
    with pytest.raises(UserError, match=f"^{first}: the target's chat template cannot render") as caught:
        data.prepare(picky)
    assert "max_malformed" not in str(caught.value)


class Asking:
    """Writes "what is N" as question N and answers it with its own words; every third question is the first one."""

    name = "asking"

    def answers(self, target: Target, requests: Any, settings: Any, known: Any = ()) -> Iterator[tuple[int, list[int]]]:
        for number, request in enumerate(requests):
            words = request.messages[-1]["content"] if request.messages else f"what is {number * bool(number % 3)}"
            ids = target.tokenizer(words, add_special_tokens=False)["input_ids"]
            yield number, [*ids, target.tokenizer.eos_token_id]

    def close(self) -> None:
        return


def test_a_target_that_asks_itself(target: Target, tmp_path: Path) -> None:
    settings = {"sequence_length": 128, "max_new_tokens": 24, "limit": 9, "validation_limit": 600}
    source = SelfWritten(max_question_tokens=24)
    data = DataModule(source, cache_dir=str(tmp_path), benchmark=["What is 4?"], **settings)
    with pytest.warns(UserWarning, match="of 9 train conversations hold what the benchmark asks"):
        data.prepare(target, Asking())
    about = data.about("train")
    assert (about["rejected"], about["overlapping"], about["documents"]) == (2, 1, 6)
    # Two shards of validation: what the second one repeats is found when both are there.
    about = data.about("validation")
    assert about["repeated"] > 0 and about["documents"] + about["repeated"] + about["rejected"] < 600
    # What is decoded while training are the questions that were kept.
    prompts = data.evaluation_prompts("validation", 5, max_new_tokens=24)
    asked = [target.tokenizer.decode(ids) for _, ids in prompts]
    assert len(set(asked)) == 5 and all("what is " in text for text in asked)
    assert prompts == data.evaluation_prompts("validation", 6, max_new_tokens=24)[:5]


class Endless:
    """Never comes to an end, and counts what it was asked."""

    name = "endless"

    def __init__(self) -> None:
        self.asked = 0

    def answers(self, target: Target, requests: Any, settings: Any, known: Any = ()) -> Iterator[tuple[int, list[int]]]:
        for number, _ in enumerate(requests):
            self.asked += 1
            yield number, target.tokenizer("value " * 99)["input_ids"][: settings.max_new_tokens]

    def close(self) -> None:
        return


def twice(n: int) -> dict[str, Any]:
    return {
        "messages": messages(n)["messages"]
        + [{"role": "user", "content": "more"}, {"role": "assistant", "content": "1"}]
    }


def test_a_line_says_what_became_of_the_conversations(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [twice(n) for n in range(60)])
    data = module(path, tmp_path, regenerate=True, max_new_tokens=8)
    sizes = [len(data.preparation.source.conversations(split)) for split in ("train", "validation", "test")]
    assert sum(sizes) == 60
    said = "data: {} conversations to train on, {} for validation, {} held out".format(*sizes)
    learned = sum(sizes[:2])
    cut = f" (answers cut at data.max_new_tokens=8: {learned}, turns dropped after them: {learned})"
    for _ in range(2):  # the second finds them prepared
        data.prepare(target, Endless())
        assert capsys.readouterr().out == f"{said}{cut}\n"
    module(path, tmp_path).prepare(target)
    assert capsys.readouterr().out == f"{said}\n"
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    data.prepare(target, Endless())
    assert not capsys.readouterr().out


def test_a_split_without_conversations_is_refused_before_the_target_answers(target: Target, tmp_path: Path) -> None:
    records = [messages(n) for n in range(60)]
    known = module(write(tmp_path / "all.jsonl", records), tmp_path).preparation.source.conversations("train")
    asked = {conversation.prompt_messages[0]["content"] for conversation in known}
    alone = [record for record in records if record["messages"][0]["content"] in asked]
    data = module(write(tmp_path / "a.jsonl", alone), tmp_path, regenerate=True)
    engine = Endless()
    with pytest.raises(UserError, match="has no conversations in its validation split"):
        data.prepare(target, engine)
    assert engine.asked == 0


def test_whether_the_target_answers_is_true_or_false():
    with pytest.raises(UserError, match=r"data\.regenerate is no: expected true or false"):
        Preparation(None, regenerate="no")
