"""Read in any order; whatever is not right is named."""

import pickle

import pytest
import torch

from specdraft.data.store import Store, StoredData, reader
from specdraft.data.store.contents import stored_positions
from specdraft.errors import UserError


def test_sequences_come_back_in_any_order(making):
    store = making.store()
    assert len(store.shards["train"]) > 3
    for split, rows in making.batches.items():
        for name, value in vars(rows).items():
            assert torch.equal(getattr(store.data[split].whole(), name), value)
        expected = [making.features(rows.input_ids[i : i + 1], rows.position_ids[i : i + 1]) for i in range(len(value))]
        for order in ([0], [1, 0, 1], list(range(len(value)))[::-1]):
            found = store.read(split, order).decode(torch.float32)
            assert torch.equal(found.aux, torch.cat([expected[i].aux for i in order]))
            assert torch.equal(found.last, torch.cat([expected[i].last for i in order]))


def test_a_store_goes_to_another_process_without_its_mapped_shards(making):
    store = making.store()
    expected = store.read("train", [3, 0]).decode(torch.float32)
    sent = pickle.dumps(store)
    assert len(sent) < store.contents.bytes() / 4
    found = pickle.loads(sent).read("train", [3, 0]).decode(torch.float32)
    assert torch.equal(found.aux, expected.aux) and torch.equal(found.last, expected.last)


def test_few_shards_stay_mapped_and_every_sequence_is_still_read(making, monkeypatch):
    store = making.store()
    order = range(len(making.batches["train"].input_ids))
    expected = store.read("train", order).decode(torch.float32)
    assert len(store._mapped) > 3
    monkeypatch.setattr(reader, "_MAX_MAPPED", 2)
    frugal = Store(making.path)
    for _ in range(2):
        assert torch.equal(frugal.read("train", order).decode(torch.float32).aux, expected.aux)
        assert len(frugal._mapped) == 2


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_only_what_teaches_is_kept_and_the_rest_is_nan(making, dtype):
    whole, part = making.store(dtype=dtype), making.store(making.path / "part", every_last=False, dtype=dtype)
    assert part.contents.bytes() < whole.contents.bytes()
    for split, rows in making.batches.items():
        order = list(range(len(rows.input_ids)))[::-1]
        kept = stored_positions(rows, every_last=False)[order]
        complete, found = (store.read(split, order).decode(torch.float32) for store in (whole, part))
        assert torch.equal(found.aux, complete.aux)
        assert torch.equal(found.last[kept], complete.last[kept])
        assert found.last[~kept].isnan().all()
        assert 0 < kept.sum() < kept.numel()


def test_a_store_without_auxiliary_layers(making):
    writer = making.writer(layers=())
    writer.write(lambda ids, positions: making.target.features(ids, positions, ()), 2)
    found = Store(making.path).read("train", [1]).decode(torch.float32)
    assert found.aux.shape == (1, 32, 0)
    assert found.last.shape == (1, 32, 32)


def test_no_store_and_an_unfinished_one_are_named(making):
    with pytest.raises(UserError, match="there is no store at"):
        Store(making.path)

    def interrupted(input_ids, position_ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        making.writer().write(interrupted, 1)
    with pytest.raises(UserError, match=r"is unfinished: run specdraft store again"):
        Store(making.path)


def test_a_missing_shard_is_named_and_written_again(making):
    name = making.store().shards["train"][1]
    (making.path / name).unlink()
    with pytest.raises(UserError, match=f"lacks 1 of its files, {name} among them"):
        Store(making.path)
    making.store()
    assert (making.path / name).exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_named_when_it_is_touched(making, damage):
    store = making.store()
    name = store.shards["train"][1]
    content = bytearray((making.path / name).read_bytes())
    content[-5] ^= 1
    changed = {"flip": content, "cut": content[:-100], "empty": b""}[damage]
    (making.path / name).write_bytes(changed)
    store = Store(making.path)
    store.read("train", [0]).decode(torch.float32)
    with pytest.raises(UserError, match=f"{name} is damaged: its checksum is"):
        store.read("train", [store.contents.sequences_per_shard]).decode(torch.float32)


@pytest.mark.parametrize("name", ["document_ids", "position_ids"])
def test_sequences_that_cannot_be_are_named(making, name):
    getattr(making.batches["train"], name)[3] -= 40
    making.writer().write(making.features, 1)
    with pytest.raises(UserError, match=r"train-sequences-.* holds impossible positions or documents"):
        Store(making.path)


def test_another_target_tokenizer_or_data_is_refused(making):
    store, target = making.store(), making.target
    store.check(target, making.settings)
    with pytest.raises(UserError, match=r"was written with data\.source\.name=random, and this run has other"):
        store.check(target, {"limit": 20, "source": {"name": "other"}})
    weight = next(target.model.parameters())
    weight.data += 1
    other = type(target).from_model(target.model, name="changed")
    with pytest.raises(UserError, match="belongs to the target 'tiny', whose configuration or weights are not those"):
        store.check(other, making.settings)

    class Tokenizer:
        chat_template = "{{ messages }}"

        def get_vocab(self):
            return {"a": 0}

    target.tokenizer = Tokenizer()
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        store.check(target, making.settings)


def test_fp8_travels_as_it_is_stored_and_is_decoded_where_it_arrives(making):
    store = making.store(dtype="float8", every_last=False)
    batch = StoredData(store, "train")[0]
    aux, last, places = batch.states
    assert aux.codes.dtype == last.codes.dtype == torch.float8_e4m3fn
    assert len(last.codes) == len(places) == int(batch.before_learned().sum()) < batch.input_ids.numel()
    moved = batch.to("meta")
    assert moved.states.aux.codes.is_meta and moved.states.last.scale.is_meta and moved.read is moved.input_ids
    found = moved.features(making.target, (1, 3), every_last=False)
    assert found.aux.is_meta and found.aux.shape == (1, 32, 64) and found.last.shape == (1, 32, 32)
