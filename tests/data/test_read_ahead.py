"""Batches come as without the thread, one by one and in order; meanwhile the next are read, and none in vain."""

import copy
import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from specdraft.data.datamodule import DataModule
from specdraft.data.read_ahead import ReadAhead
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle3
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import ReadBatch
from specdraft.targets.server import Server
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.data.store.conftest import packed
from tests.targets.test_server import Engine


class Reading:
    """A loader of batches 0, 1, 2, ... whose reads are noted; the one numbered ``stops`` waits to be hung up on."""

    def __init__(self, count: int, depth: int, stops: int | None = None) -> None:
        self.begun: list[int] = []
        self.hung_up, self.waits = threading.Event(), threading.Event()
        self.stops = stops
        rows: Any = range(count)
        self.loader = ReadAhead(DataLoader(rows, batch_size=None), depth, self.read, self.hung_up.set)

    def read(self, number: Any) -> Any:
        self.begun.append(number)
        if number == self.stops:
            self.waits.set()
            assert self.hung_up.wait(20)
            raise UserError("the requests were ended")
        return number

    def wait_for(self, count: int) -> None:
        deadline = threading.Event()
        for _ in range(400):
            if len(self.begun) >= count:
                return
            deadline.wait(0.05)
        raise AssertionError(f"{self.begun} were read, expected {count}")


def test_the_next_are_read_meanwhile_and_no_more_than_that():
    reading = Reading(6, depth=2)
    assert len(reading.loader) == 6
    for number, batch in enumerate(reading.loader):
        assert batch == number
        reading.wait_for(min(6, number + 3))  # before this step ends
        assert reading.begun == list(range(min(6, number + 3)))
    assert list(reading.loader) == list(range(6))  # and again


def test_what_fails_is_raised_where_its_batch_would_come():
    reading = Reading(6, depth=3, stops=2)
    reading.hung_up.set()
    batches = iter(reading.loader)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(UserError, match="the requests were ended"):
        next(batches)


@pytest.mark.parametrize("taken", [0, 2])
def test_closing_ends_a_read_that_waits(taken):
    reading = Reading(6, depth=2, stops=1 + taken)
    batches = iter(reading.loader)
    next(batches)
    for _ in range(taken):
        next(batches)
    assert reading.waits.wait(20)
    before = threading.active_count()
    reading.loader.close()
    assert threading.active_count() < before and next(batches, None) is None
    assert len(reading.begun) == 2 + taken


def test_a_loader_that_is_given_up_takes_its_thread_along():
    gc.disable()  # it must not wait for the collector
    try:
        rows: Any = range(6)
        before, loader = reading_threads(), ReadAhead(DataLoader(rows, batch_size=None), depth=2)
        next(iter(loader))
        assert len(reading_threads() - before) == 1
        del loader
        assert reading_threads() <= before
    finally:
        gc.enable()


def test_an_interrupt_of_the_wait_ends_the_read(monkeypatch):
    reading = Reading(6, depth=1, stops=0)

    def interrupted(_future: Any) -> None:
        assert reading.waits.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(reading.loader))
    assert reading.hung_up.is_set() and reading.begun == [0]


def test_the_loaders_own_thread_count_stays():
    before = torch.get_num_threads()
    list(Reading(3, depth=1).loader)
    assert torch.get_num_threads() == before


# --- a training whose target is read by a server ------------------------------------------------------------------


@pytest.fixture
def remote(target: Target, tmp_path: Path):
    """A target that a server reads; ``engine`` is that server, with a copy of the target."""
    here = Target.from_model(target.model.float(), target.tokenizer)
    there = Target.from_model(copy.deepcopy(here.model), target.tokenizer)
    engine = Engine(SimpleNamespace(target=there), tmp_path / "passing")  # type: ignore[arg-type]
    engine.layers = [1, 2, 3, there.num_layers]
    here.server = Server(engine.url, concurrency=2, attempts=2, backoff=0.01, timeout=20)
    yield here, engine
    engine.http.shutdown()
    engine.http.server_close()


class Watch(Callback):
    """Notes the losses; ``during`` is called in every step."""

    def __init__(self, during: Any = None) -> None:
        self.losses: list[float] = []
        self.kinds: list[type] = []
        self.during = during

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.kinds.append(type(batch))
        if self.during is not None:
            self.during(batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())


def make(library: Path, cache: Path, **options: Any) -> DataModule:
    settings = {"sequence_length": 128, "batch_size": 1, "limit": 24, "validation_limit": 4, "regenerate": False}
    return DataModule(PythonStdlib(root=str(library)), **settings | {"cache_dir": str(cache)} | options)


def train(target: Target, data: DataModule, steps: int, watch: Watch, kind: Any = Eagle3, **options: Any) -> Watch:
    data.prepare(target)
    torch.manual_seed(0)
    drafter: Drafter = kind.for_target(target, **options.pop("drafter", {}))
    data.read_for(drafter)
    checkpoint = options.pop("ckpt_path", None)
    callbacks = [watch, *options.pop("callbacks", [])]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **{"num_sanity_val_steps": 0, "limit_val_batches": 0} | options,
    )
    before = reading_threads()
    trainer.fit(DrafterModule(drafter, target, OptimizerSettings(learning_rate=1e-3)), data, ckpt_path=checkpoint)
    assert reading_threads() <= before
    return watch


def reading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")}


def documents(data: DataModule, numbers: list[int]) -> int:
    return int((data.packed["train"].__getitems__(numbers).position_ids == 0).sum())


@pytest.mark.filterwarnings("ignore")
def test_the_server_is_asked_for_the_next_batch_before_a_step_ends_and_for_no_more_than_is_trained(
    remote, library, tmp_path
):
    target, engine = remote
    data = make(library, tmp_path, read_ahead=1)

    def during(step: int) -> None:
        wanted = 1 + sum(documents(data, data.step_indices(number)) for number in range(min(step + 2, 4)))
        for _ in range(400):
            if len(engine.asked) >= wanted:
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"{len(engine.asked)} documents were asked for in step {step}, expected {wanted}")

    watch = train(target, data, 4, Watch(during))
    assert len(watch.losses) == 4 and set(watch.kinds) == {ReadBatch}
    asked = 1 + sum(documents(data, data.step_indices(number)) for number in range(4))
    assert len(engine.asked) == asked < 1 + documents(data, list(range(len(data.packed["train"]))))


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_without_it_and_a_resumed_run_goes_on_exactly(remote, library, tmp_path):
    target, _ = remote

    def run(ahead: int, **options: Any) -> list[float]:
        # Validation reads the same server in between.
        between = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
        return train(target, make(library, tmp_path, read_ahead=ahead), 20, Watch(), **between | options).losses

    expected = run(0)
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    assert run(2, callbacks=[saver]) == expected and len(expected) == 20
    data = make(library, tmp_path)
    data.prepare(target)
    assert 4 < len(data.train_dataloader()) < 16  # one place within the first epoch, one behind it
    for step in (4, 16):
        assert run(3, ckpt_path=tmp_path / "saved" / f"step={step}.ckpt") == expected[step:]


@pytest.mark.filterwarnings("ignore")
def test_what_the_server_does_wrong_ends_the_training_in_one_sentence(remote, library, tmp_path):
    target, engine = remote

    def during(step: int) -> None:
        if step == 2:
            engine.faults = ["400"] * 100

    watch, before = Watch(during), reading_threads()
    with pytest.raises(UserError, match="refuses /completions with status 400"):
        train(target, make(library, tmp_path), 8, watch)
    assert 3 <= len(watch.losses) < 8
    assert reading_threads() <= before


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_a_step_ends_a_read_that_waits(remote, library, tmp_path):
    target, engine = remote

    def during(step: int) -> None:
        if step == 1:
            engine.faults = ["stalls"] * 100
        for _ in range(100):
            if engine.held:
                raise ValueError("of the step")
            threading.Event().wait(0.05 * step)

    target.server = Server(engine.url, concurrency=2, attempts=1, timeout=600)
    with pytest.raises(ValueError, match="of the step"):
        train(target, make(library, tmp_path, read_ahead=3), 8, Watch(during))


@pytest.mark.filterwarnings("ignore")
def test_text_of_the_drafters_own_is_read_when_it_is_there(remote, library, tmp_path):
    target, engine = remote
    engine.layers = [target.num_layers]

    def run(ahead: int) -> Watch:
        options = {"copy_layers": 1, "on_policy": 1.0}
        return train(target, make(library, tmp_path, read_ahead=ahead), 6, Watch(), DraftModel, drafter=options)

    expected, found = run(0), run(1)
    assert found.losses == expected.losses
    assert found.kinds[0] is ReadBatch and found.kinds[-1] is not ReadBatch  # nothing more is read in vain


def test_a_batch_that_was_read_moves_as_a_whole():
    rows, states = packed(2, seed=0), torch.zeros(1)
    batch = ReadBatch(**vars(rows), connection=None, read=rows.input_ids, states=states)  # type: ignore[arg-type]
    moved = batch.to("meta")
    assert moved.states.is_meta and moved.read is moved.input_ids
