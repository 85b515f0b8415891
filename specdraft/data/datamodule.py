"""The DataModule: everything between a source and batches, done before training starts.

R = packed sequences, T = tokens in a sequence, B = sequences in a batch, V = target vocabulary."""

import copy
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from specdraft.data.bucket import Bucket, is_url
from specdraft.data.packing import PackedData, openings
from specdraft.data.preparation import Preparation, Split
from specdraft.data.read_ahead import ReadAhead
from specdraft.data.regeneration.in_process import InProcess
from specdraft.data.regeneration.request import Engine
from specdraft.data.sampler import ResumableSampler
from specdraft.data.sources.base import Source
from specdraft.data.sources.self_written import is_self_written
from specdraft.data.store import Store, StoredData
from specdraft.data.store.local_copy import local_copy
from specdraft.data.tokenization.chat import RefusedError, opening_ids
from specdraft.data.tokenization.draft_vocabulary import build_draft_vocabulary, count, coverage
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.drafters.base import Drafter
from specdraft.errors import UserError, check_whole_number
from specdraft.targets import Target
from specdraft.targets.batch import Batch, ReadBatch
from specdraft.targets.server import Connection

Loader = DataLoader[Batch] | ReadAhead


class DataModule(LightningDataModule):
    """Packed batches of a source's conversations, once ``prepare(target)`` has done all the work. The module's own
    sampler and state keep the order of batches and the place in it: use ``Trainer(use_distributed_sampler=False)``."""

    def __init__(
        self,
        source: Source,
        batch_size: int = 4,
        num_workers: int | None = None,
        read_ahead: int = 2,
        store: str | None = None,
        seed: int = 0,
        **preparation: Any,
    ) -> None:
        """Nothing is read yet. ``num_workers`` processes of each loader read sequences (None: see ``_workers``); with
        ``store``, a directory or the URL of one in a bucket, these and hidden states come from there. ``read_ahead``
        batches of hidden states are read by a thread before they are trained on. ``preparation``: settings of
        ``Preparation``. Raises UserError."""
        super().__init__()
        check_whole_number("data.batch_size", batch_size, 1, "the sequences per device and step")
        check_whole_number("data.num_workers", num_workers or 0, 0, "the processes per loader, or null")
        check_whole_number("data.read_ahead", read_ahead, 0, "the batches that are read before they are trained on")
        self.preparation = Preparation(source, seed=seed, **preparation)
        self.batch_size, self.num_workers, self.read_ahead, self.seed = batch_size, num_workers, read_ahead, seed
        self.store_path = store
        self._store: Store | None = None
        self._target: Target  # of ``prepare``
        self._splits: dict[str, Split] = {}
        self._sampler: ResumableSampler | None = None
        self._resume: dict[str, Any] | None = None
        self._connection: Connection | None = None
        self._ahead: list[ReadAhead] = []

    @classmethod
    def of_path(cls, path: str, source: Callable[[str], Source], **settings: Any) -> "DataModule":
        """The module whose source reads ``path``: so that the path of the data is a setting beside the others."""
        return cls(source(path), **settings)

    def prepare(self, target: Target, engine: Engine | None = None) -> None:
        """Read, regenerate (or find in the cache), tokenize, pack and count; or open the store. Raises UserError.
        ``engine`` lets the target answer; None: in this process. The first rank prints a line about the data."""
        self._target = target
        if self.store_path is None:
            with closing(engine or InProcess()) as answering:
                sizes = self.preparation.sizes()
                for split in ("train", "validation"):
                    self._splits[split] = self.preparation.prepare(target, split, answering)
            rank_zero_only(print)(self.preparation.summary(sizes, [split.about for split in self._splits.values()]))
            return
        shared = is_url(self.store_path)
        self._store = Store(local_copy(Bucket(self.store_path)) if shared else Path(self.store_path).expanduser())
        self._store.check(target, self.preparation.settings())
        for split, data in self._store.data.items():
            about = dict(self._store.contents.splits[split].about)
            if "fingerprint" not in about:
                raise UserError(f"the store {self.store_path} does not describe its {split} split: write it again")
            counts = torch.zeros(target.vocab_size, dtype=torch.int64)
            for batch in data.blocks():
                counts += count(batch.input_ids[batch.loss_mask], target.vocab_size)
            self._splits[split] = Split(data, counts, about)

    def read_for(self, drafter: Drafter) -> None:
        """Batches are for this drafter from now on: what a server has to read is read ahead. Raises UserError if it
        reads what the store, if there is one, does not hold."""
        if self._store is not None:
            self._store.origin.check(drafter.layers, drafter.reads_every_last)
        elif self._target.server is not None:
            self._connection = self._target.connection(self._target.server, drafter.layers)

    @property
    def response_counts(self) -> Tensor:
        """How often each token id is to be learned in the training split, ``[V]`` int64."""
        return self._prepared("train").counts

    def draft_vocabulary(self, size: int | None) -> Tensor:
        """Sorted target ids ``[Vd]`` for a draft vocabulary of ``size`` (None: all), the end marks among them."""
        return build_draft_vocabulary(self.response_counts, size, self._target.eos_token_ids)

    def coverage(self, vocabulary: Tensor) -> dict[str, float]:
        """The share of supervised tokens of each split that lies in the draft vocabulary."""
        return {f"{split}_coverage": coverage(data.counts, vocabulary) for split, data in self._splits.items()}

    def evaluation_prompts(
        self, split: str, limit: int | None = None, max_new_tokens: int = 128
    ) -> list[tuple[str, list[int]]]:
        """Categories and token ids of prompts to decode: a random sample of those with room for ``max_new_tokens``.
        Where the target writes the questions they are those of the packed sequences."""
        room = self._target.max_length - max_new_tokens
        found: list[tuple[str, list[int]]] = []
        said = f"no {split} prompt of {self.preparation.source.name} leaves room for {max_new_tokens} new tokens"
        failure = UserError(f"{said} in the target's context of {self._target.max_length}: lower max_new_tokens")
        for conversation in self.preparation.conversations(split):
            if is_self_written(conversation):
                found = [("self", ids) for ids in openings(self._prepared(split).data) if len(ids) <= room][:limit]
                break
            if limit is not None and len(found) == limit:
                break
            try:
                ids = opening_ids(self._target.tokenizer, conversation)
            except RefusedError as error:  # counted and reported when the data was prepared
                failure = error
                continue
            if len(ids) <= room:
                found.append((conversation.category, ids))
        if not found:
            raise failure
        return found

    @property
    def packed(self) -> dict[str, PackedData]:
        """The packed sequences by split."""
        return {split: self._prepared(split).data for split in self._splits}

    def about(self, split: str) -> dict[str, Any]:
        """What packing made of a split, its fingerprint, and how many conversations were left out or cut."""
        return self._prepared(split).about

    def describe(self) -> dict[str, Any]:
        """The numbers that a run logs about its data."""
        made = self.preparation
        about: dict[str, Any] = {
            "source": made.source.name,
            "regenerated": made.regenerate,
            "temperatures": list(made.generation.temperatures) if made.regenerate else [],
            "sequence_length": made.sequence_length,
            "hidden_states": f"stored in {self._store.contents.dtype}" if self._store else "computed",
        }
        for split in self._splits:
            about |= {f"{split}_{name}": value for name, value in self.about(split).items()}
        return about

    def train_dataloader(self) -> Loader:
        """Whole batches in the sampler's order, from where a resumed run left it."""
        rank, world_size = self._rank()
        accumulate = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        split = self._prepared("train")
        sampler = ResumableSampler(
            len(split.data), self.batch_size, self.seed, rank, world_size, accumulate, self._steps_left
        )
        if self._resume is not None:
            if self._resume["data"] != split.about["fingerprint"]:
                raise UserError(
                    "the checkpoint was trained on other data: resume with its settings, or start a new run"
                )
            sampler.load_state_dict(self._resume)
        self._sampler = sampler
        trainer, batches = self.trainer, len(sampler) // self.batch_size
        if trainer is not None and trainer.check_val_every_n_epoch and trainer.val_check_interval > batches:
            what = f"trainer.val_check_interval is {trainer.val_check_interval}, and an epoch has {batches:,} batches"
            raise UserError(f"{what}: lower it, or set trainer.check_val_every_n_epoch=null to count across epochs")
        return self._loader("train", sampler)

    def step_batch(self, batch_idx: int) -> Batch:
        """All sequences of this rank in the optimizer step that begins with batch ``batch_idx`` of the epoch."""
        return self._prepared("train").data.__getitems__(self.step_indices(batch_idx))

    def step_indices(self, batch_idx: int) -> list[int]:
        """Their indices among the training sequences."""
        assert self._sampler is not None, "there are steps once there is a loader"
        return self._sampler.step_indices(batch_idx)

    def val_dataloader(self) -> Loader:
        """All validation sequences, dealt out over the ranks; padding makes the shares equal."""
        rank, world_size = self._rank()
        size = len(self._prepared("validation").data)
        missing = -size % (self.batch_size * world_size)
        return self._loader("validation", range(rank, size + missing, world_size))

    def _loader(self, split: str, order: Iterable[int]) -> Loader:
        data, connection, workers = self._prepared(split).data, self._connection, self._workers()
        if self._store is not None:  # a copy: other threads map the shards for themselves
            data = StoredData(copy.copy(self._store), split)
        loader = DataLoader(
            data,
            self.batch_size,
            sampler=order,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_unchanged,
        )
        on_gpu = self._on_gpu()
        if self.read_ahead == 0 or not (connection or self._store or on_gpu):
            return loader
        reading = ReadAhead(loader, self.read_ahead, pinned=on_gpu)
        if connection is not None:
            reading.read, reading.hang_up = partial(ReadBatch.of, connection=connection), connection.clients.hang_up
        self._ahead.append(reading)
        return reading

    def _workers(self) -> int:
        """Of each loader: two where the hidden states of a store go to a GPU, whose host has cores to spare. Elsewhere
        none: making a packed batch takes less than handing it over, and on a CPU they would take training's cores."""
        if self.num_workers is not None:
            return self.num_workers
        if self._store is None or self.trainer is None or not self._on_gpu():
            return 0
        return max(0, min(2, available_cores() // self.trainer.num_devices - 1))

    def teardown(self, stage: str) -> None:
        """Nothing more is read."""
        for reading in self._ahead:
            reading.close()
        self._ahead.clear()

    def on_exception(self, exception: BaseException) -> None:
        """As at the end."""
        self.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of batches, after the last whole step; the same on every rank."""
        if self._sampler is None or self.trainer is None:
            return {}
        # Not "completed": checkpoints are written by hooks that run before Lightning counts that.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        accumulate = self.trainer.accumulate_grad_batches
        place = self._sampler.state_dict(self.trainer.current_epoch, progress.processed // accumulate * accumulate)
        return {"data": self._prepared("train").about["fingerprint"]} | place

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there: takes effect when the training loader is made."""
        self._resume = state_dict or None

    def batches_done(self) -> int:
        """How many batches of its epoch a resumed run has done, as its own ranks take them."""
        _, world_size = self._rank()
        return self._resume["sequences"] // (self.batch_size * world_size) if self._resume else 0

    def _prepared(self, split: str) -> Split:
        if split not in self._splits:
            raise RuntimeError("call prepare(target) first")
        return self._splits[split]

    def _rank(self) -> tuple[int, int]:  # and how many there are
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _steps_left(self) -> int | None:
        trainer = self.trainer
        return None if trainer is None or trainer.max_steps < 0 else trainer.max_steps - trainer.global_step

    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _unchanged(batch: Any) -> Any:
    return batch
