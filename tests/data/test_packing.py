import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from specdraft.data.packing import PackedSegments, PackedTensor, pack, pack_flat, padding
from specdraft.data.tokenization.cache import cached_examples, flatten, in_chunks
from specdraft.data.tokenization.chat import Example
from specdraft.errors import UserError
from specdraft.targets.batch import Batch
from tests.data.written import same


def examples(count: int, longest: int, seed: int = 0) -> list[Example]:
    """Each example is made of its own number, so that it can be found again."""
    rng = random.Random(seed)
    made = []
    for number in range(1, count + 1):
        length = rng.randint(2, longest)
        prompt = rng.randint(1, length - 1)
        made.append(Example([number * 1000 + i for i in range(length)], [i >= prompt for i in range(length)]))
    return made


def documents(batch: Batch) -> list[Example]:
    found = []
    for row in range(batch.input_ids.shape[0]):
        ids = batch.document_ids[row]
        for document in ids[ids >= 0].unique():
            inside = ids == document
            assert batch.position_ids[row, inside].tolist() == list(range(int(inside.sum())))
            found.append(Example(batch.input_ids[row, inside].tolist(), batch.loss_mask[row, inside].tolist()))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_token_is_lost_and_positions_restart(seed: int) -> None:
    given = examples(100, 64, seed)
    batch, report = pack(given, 64)
    assert sorted(documents(batch)) == sorted(given)
    assert report.documents == 100
    assert report.sequences == len(batch.input_ids)
    assert (batch.document_ids >= 0).any(1).all()
    assert report.tokens == sum(len(e.input_ids) for e in given) == int((batch.document_ids >= 0).sum())
    assert report.supervised_tokens == int(batch.loss_mask.sum())
    assert (report.split, report.unsupervised) == (0, 0)


def test_padding_is_no_document_and_not_supervised() -> None:
    batch, report = pack(examples(7, 40), 64)
    outside = batch.document_ids == -1
    assert outside.any()
    assert (batch.input_ids[outside] == 0).all()
    assert not batch.loss_mask[outside].any()
    assert report.padding_share == pytest.approx(outside.float().mean().item())
    # Padding follows the documents, as a sequence of its own.
    for row in range(report.sequences):
        size = int(outside[row].sum())
        assert outside[row, 64 - size :].all()
        assert batch.position_ids[row, 64 - size :].tolist() == list(range(size))


def test_documents_of_a_sequence_are_contiguous_and_distinct() -> None:
    batch, _ = pack(examples(60, 20), 64)
    for row in batch.document_ids:
        changes = torch.cat([row[:1], row[1:][row[1:] != row[:-1]]])
        assert len(changes) == len(changes.unique())


def test_sequences_are_filled_well() -> None:
    _, report = pack(examples(500, 64), 128)
    assert report.padding_share < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_longer_examples_are_split_and_every_token_is_learned_once(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(65, 400)
    turns = [rng.random() < 0.5 for _ in range(length // 16 + 1)]
    long = Example(list(range(length)), [turns[i // 16] or i == length - 1 for i in range(length)])
    batch, report = pack([long, *examples(20, 64, seed + 1)], 64)
    assert report.split == 1
    pieces = [e for e in documents(batch) if e.input_ids[0] < 1000]
    learned = [token for e in pieces for token, learn in zip(*e, strict=True) if learn]
    assert sorted(learned) == [token for token, learn in zip(*long, strict=True) if learn]
    for ids, mask in pieces:
        assert ids == list(range(ids[0], ids[-1] + 1))
        assert ids[0] == 0 or mask.index(True) == 16  # a quarter of a sequence of context
    assert report.documents == 20 + len(pieces)


def _resident(mapped: np.memmap) -> int:
    """Bytes of the mapped file that are in this process's memory."""
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    (own,) = (block for block in blocks if str(mapped.filename) in block)
    return 1024 * int(re.search(r"^Rss: +(\d+)", own, re.MULTILINE).group(1))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="shows what is resident on Linux alone")
def test_a_mapped_file_packs_like_tokens_in_memory_and_does_not_stay_there(tmp_path: Path) -> None:
    flat = flatten(examples(400, 4000))
    flat.tokens.astype("<i4").tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", "<i4", "r")
    packed, report = pack_flat(flat._replace(tokens=mapped), 64)
    assert _resident(mapped) == 0 < mapped.nbytes
    expected, same = pack_flat(flat, 64)
    assert report == same and report.split > 300
    for name, values in vars(packed.whole()).items():
        assert torch.equal(values, getattr(expected.whole(), name))
    assert _resident(mapped) > 0


def test_a_prompt_alone_is_left_out_and_a_long_one_is_shortened() -> None:
    prompt_only = Example(list(range(200)), [False] * 200)
    long_prompt = Example(list(range(200)), [i >= 150 for i in range(200)])
    batch, report = pack([prompt_only, long_prompt], 64)
    assert [e.input_ids for e in documents(batch)] == [list(range(134, 198)), list(range(182, 200))]
    assert (report.split, report.unsupervised, report.supervised_tokens) == (1, 1, 50)


@pytest.mark.parametrize(("first", "starts"), [(47, [0]), (48, [32]), (50, [34]), (63, [47])])
def test_a_piece_begins_with_the_example_or_a_quarter_before_what_it_teaches(first: int, starts: list[int]) -> None:
    long = Example(list(range(80)), [first <= i < 64 for i in range(80)])
    assert [ids[0] for ids, _ in documents(pack([long], 64)[0])] == starts


def test_packing_is_deterministic() -> None:
    first, second = pack(examples(50, 30), 64)[0], pack(examples(50, 30), 64)[0]
    assert torch.equal(first.input_ids, second.input_ids)


def test_the_digest_is_of_all_places_and_of_the_length() -> None:
    def digest(*lengths: int, sequence_length: int = 64) -> bytes:
        return pack_flat(flatten([Example([1] * n, [True] * n) for n in lengths]), sequence_length)[0].digest()

    digests = [digest(30, 20), digest(20, 30), digest(30, 21), digest(30, 20, sequence_length=65), digest(30, 40)]
    assert len(set(digests)) == len(digests)
    assert digest(30, 20) == digests[0]


def test_a_tensor_of_sequences_gives_back_what_it_was_made_of() -> None:
    batch, _ = pack([*examples(20, 30), Example([0, 0, 1, 1], [False, True, False, True])], 32)
    packed = PackedTensor.of(batch)
    assert packed.tensor.dtype == torch.int32 and packed.sequence_length == 32
    assert same(packed.whole(), batch)
    end = len(packed)
    chosen = packed.__getitems__([2, end, 0, end + 3])
    for name, value in vars(chosen).items():
        assert torch.equal(value[[0, 2]], vars(batch)[name][[2, 0]])
        assert torch.equal(value[[1, 3]], vars(padding(2, 32))[name])


@pytest.mark.parametrize(("sequence_length", "sizes"), [(2**17, [2, 1]), (2**18 - 1, [1] * 3), (2**19, [1] * 3)])
def test_blocks_are_all_sequences_in_their_order(sequence_length: int, sizes: list[int]) -> None:
    tensor = torch.arange(3, dtype=torch.int32)[:, None, None].expand(3, 3, sequence_length)
    blocks = list(PackedTensor(tensor).blocks())
    assert [len(block.input_ids) for block in blocks] == sizes
    assert torch.cat([block.input_ids[:, -1] for block in blocks]).tolist() == [0, 1, 2]


def test_dtypes_and_shapes() -> None:
    for batch in (pack(examples(5, 30), 64)[0], padding(3, 64)):
        assert {batch.input_ids.dtype, batch.position_ids.dtype, batch.document_ids.dtype} == {torch.int64}
        assert batch.loss_mask.dtype == torch.bool
        assert batch.input_ids.shape == batch.document_ids.shape == batch.loss_mask.shape == batch.position_ids.shape
    assert batch.to("cpu").input_ids.shape == (3, 64)


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(UserError, match="none of the 1 examples"):
        pack([Example([1, 2], [False, False])], 64)
    with pytest.raises(UserError, match="sequence_length is 1"):
        pack(examples(2, 4), 1)
    assert pack(examples(3, 2), 2)[1].sequences == 3


def test_sequences_are_made_when_asked_for_also_in_another_process(tmp_path: Path) -> None:
    given = [Example(list(range(2, 2 + n)), [i % 3 > 0 for i in range(n)]) for n in (3, 40, 7, 2, 16, 15, 33)]
    expected, _ = pack(given, 16)
    found = cached_examples(tmp_path, 0, 64, lambda notes: in_chunks(given))
    packed, _ = pack_flat(found.flat, 16)
    assert same(packed.whole(), expected)
    order = [3, 0, 3, 1]
    sent: PackedSegments = pickle.loads(pickle.dumps(packed))
    assert isinstance(sent.tokens, np.memmap) and sent.tokens.filename == found.flat.tokens.filename
    alone, _ = pack_flat(flatten(given), 16)
    assert same(pickle.loads(pickle.dumps(alone)).whole(), expected)
    for some in (packed, sent):
        chosen = some.__getitems__(order)
        assert all(torch.equal(value, vars(expected)[name][order]) for name, value in vars(chosen).items())
    behind = packed.__getitems__([len(packed), len(packed) + 5])
    assert (behind.document_ids == -1).all()
    assert not behind.loss_mask.any()
