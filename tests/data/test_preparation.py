"""From conversations to packed rows: streamed, by several processes, kept on disk."""

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from specdraft.data.datamodule import DataModule
from specdraft.data.packing import PackedSegments, pack, pack_flat
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.cache import Examples, Flat, Notes, cached_examples, in_chunks
from specdraft.data.tokenization.chat import Example, example_from_words
from specdraft.data.tokenization.tokenize import Tokenized, accepted, tokenized
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch

END = 1


def messages(n: int) -> dict[str, Any]:
    words = "value " * (n % 17 + 1)
    return {"messages": [{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": f"return {words}"}]}


def sharegpt(n: int) -> dict[str, Any]:
    turns = [(role, f"{role} {n} {k}") for k in range(n % 3 + 1) for role in ("human", "gpt")]
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n}", "response": f"return {n}"}


def text(n: int) -> dict[str, Any]:
    return {"text": f"def add_{n}(step):\n    return step + {n}\n" * (n % 5 + 1)}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def module(path: str, cache: Path, *, max_malformed: int = 100, **options: Any) -> DataModule:
    source = Conversations(path, held_out=0.2, max_malformed=max_malformed)
    settings = {"regenerate": False, "sequence_length": 64, "num_proc": 1, "cache_dir": str(cache)}
    return DataModule(source, **settings | options)


def same(ours: Batch, theirs: Batch) -> bool:
    return all(torch.equal(value, vars(theirs)[name]) for name, value in vars(ours).items())


def files(cache: Path, name: str) -> list[Path]:
    return sorted(cache.glob(f"prepared/*/{name}"))


# --- the same as in memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [messages, sharegpt, pair, text])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_streamed_is_what_lists_in_memory_give(
    target: Target, tmp_path: Path, row: Callable[[int], dict[str, Any]], suffix: str
) -> None:
    rows, path = [row(n) for n in range(150)], str(tmp_path / f"a.{suffix}")
    if suffix == "jsonl":
        write(Path(path), rows)
    else:
        Dataset.from_list(rows).to_parquet(path)
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


def test_only_a_few_chunks_are_under_way(tokenizer: PreTrainedTokenizerFast, library: Path) -> None:
    conversations = PythonStdlib(root=str(library)).conversations("train")
    taken = 0

    def counted() -> Iterator[Any]:
        nonlocal taken
        for _ in range(20):
            for conversation in conversations[:64]:
                taken += 1
                yield conversation

    chunks = tokenized(tokenizer, counted(), [END], 2)
    next(chunks)
    assert taken <= 5 * 64
    assert sum(1 for _ in chunks) == 19


def test_a_killed_process_is_reported(library: Path) -> None:
    class Deadly:
        chat_template = "{{ x }}"

        def get_chat_template(self, tools: Any) -> str:
            import os

            os._exit(9)

    conversations = PythonStdlib(root=str(library)).conversations("train")
    with pytest.raises(UserError, match=r"was killed.*lower data\.num_proc"):
        list(tokenized(Deadly(), conversations, [END], 2))


# --- kept on disk ---------------------------------------------------------------------------------------------------


def some(folder: Path, decisive: Any = 0, given: list[Example] | None = None) -> Examples:
    made = [Example([5, 6, 7], [False, True, True]), Example([8], [False]), Example([9, 1], [True, True])]
    return cached_examples(folder, decisive, 10, lambda notes: in_chunks(made if given is None else given, 2))


def test_examples_come_back_from_disk(tmp_path: Path) -> None:
    first = some(tmp_path)
    assert first.flat.tokens.tolist() == [5, ~6, ~7, 8, ~9, ~1]
    assert first.flat.lengths.tolist() == [3, 1, 2]
    assert first.flat.supervised.tolist() == [2, 0, 2]
    assert first.counts.tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 0, 1]

    def fail(notes: Notes) -> Iterator[Flat]:
        raise AssertionError("what is there is not made again")

    again = cached_examples(tmp_path, 0, 10, fail)
    assert np.array_equal(again.flat.tokens, first.flat.tokens)
    assert again.fingerprint == first.fingerprint
    with pytest.raises(AssertionError):
        cached_examples(tmp_path, 1, 10, fail)
    assert len(some(tmp_path, 2, []).flat.lengths) == 0


@pytest.mark.parametrize("name", ["tokens.bin", "lengths.npy", "counts.npy", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_examples_are_named_and_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    tokens = some(tmp_path).flat.tokens.tolist()
    (file,) = tmp_path.glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:-3] if damage == "cut" else b"?" + whole[1:])
    with pytest.warns(UserWarning, match=f"{name} are damaged and are made again"):
        again = some(tmp_path)
    assert file.read_bytes() == whole
    assert again.flat.tokens.tolist() == tokens


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    def breaks(notes: Notes) -> Iterator[Flat]:
        yield from in_chunks([Example([5], [True])])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_examples(tmp_path, 0, 10, breaks)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    (key,) = (path.stem for path in tmp_path.glob("*.lock"))
    left = tmp_path / f".{key}.0123.tmp"  # as a killed process leaves it
    left.mkdir()
    some(tmp_path)
    assert not left.exists()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="token id 10, the target's vocabulary ends at 9"):
        some(tmp_path, 0, [Example([10], [True])])


def test_a_second_run_prepares_nothing_and_other_data_is_prepared(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [messages(n) for n in range(60)]
    first = module(write(tmp_path / "a.jsonl", rows), tmp_path)
    first.prepare(target)
    assert len(files(tmp_path, "index.json")) == 2
    # What is said decides, not the file.
    moved = module(write(tmp_path / "b.jsonl", rows[::-1]), tmp_path)
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
    assert len(files(tmp_path, "index.json")) == before  # rows of another length are of the same examples
    assert longer.about("train")["fingerprint"] not in prints


def test_a_file_that_changes_under_the_hands_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [messages(n) for n in range(60)])
    found = Conversations(path).conversations("train")
    first = found[0]
    write(Path(path), [messages(n) for n in range(100, 160)])
    with pytest.raises(UserError, match=f"{first.id} changed while it was read"):
        found[0]


def test_a_limit_takes_the_same_conversations_whatever_else_is_read(tmp_path: Path) -> None:
    rows = [messages(n) for n in range(200)]
    whole = list(Conversations(write(tmp_path / "a.jsonl", rows)).conversations("train"))
    for limit in (1, 10, 1000):
        limited = Conversations(write(tmp_path / "b.jsonl", rows[::-1] + rows)).conversations("train", limit)
        assert [c.messages for c in limited] == [c.messages for c in whole[:limit]]
        assert len(limited) == min(limit, len(whole))


# --- rows made when they are asked for ------------------------------------------------------------------------------


def test_rows_are_made_when_asked_for_also_in_another_process(tmp_path: Path) -> None:
    given = [Example(list(range(2, 2 + n)), [i % 3 > 0 for i in range(n)]) for n in (3, 40, 7, 2, 16, 15, 33)]
    expected, _ = pack(given, 16)
    found = cached_examples(tmp_path, 0, 64, lambda notes: in_chunks(given))
    rows, _ = pack_flat(found.flat, 16)
    assert same(rows.whole(), expected)
    order = [3, 0, 3, 1]
    sent: PackedSegments = pickle.loads(pickle.dumps(rows))
    assert isinstance(sent.tokens, np.memmap)
    for some_rows in (rows, sent):
        chosen = some_rows.__getitems__(order)
        assert all(torch.equal(value, vars(expected)[name][order]) for name, value in vars(chosen).items())
    behind = rows.__getitems__([len(rows), len(rows) + 5])
    assert (behind.document_ids == -1).all()
    assert not behind.loss_mask.any()


# --- malformed ------------------------------------------------------------------------------------------------------

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
    rows = [messages(n) for n in range(100)]
    for line in lines:
        rows[line - 1]["messages"][0]["content"] += " refuse"
    return write(folder / "a.jsonl", rows)


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


def test_what_is_noted_when_nothing_is_refused() -> None:
    notes = Notes()
    chunk = next(in_chunks([Example([1], [True])]))
    assert list(accepted([Tokenized(chunk, [])], 0, "conversations", notes)) == [chunk]
    assert notes.counts == {"unsafe": 0}
    assert not notes.warnings
