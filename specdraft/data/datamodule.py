"""The DataModule: everything between a source and batches, done before training starts.

R = rows, T = tokens in a row, V = target vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from specdraft.data.packing import PackingReport, Rows
from specdraft.data.preparation import BESIDES, Preparation, Split
from specdraft.data.regeneration import Engine, RegenerationSettings, default_cache_dir
from specdraft.data.regeneration.in_process import InProcess
from specdraft.data.sampler import ResumableSampler
from specdraft.data.sources.base import Source
from specdraft.data.sources.decontamination import Benchmark
from specdraft.data.store import Store, StoredRows
from specdraft.data.tokenization.chat import RefusedError, opening_ids
from specdraft.data.tokenization.draft_vocabulary import build_draft_vocabulary, count_supervised, coverage
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.errors import UserError
from specdraft.targets.batch import Batch

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target


class DataModule(LightningDataModule):
    """Packed batches of a source's conversations, answered by the target or as they are.

    ``prepare(target)`` does all the work; the loaders, counts and prompts are there afterwards. The order of batches
    and the place in it belong to the module's own sampler and state: use ``Trainer(use_distributed_sampler=False)``.
    """

    def __init__(
        self,
        source: Source,
        sequence_length: int = 512,
        batch_size: int = 4,
        limit: int | None = None,
        validation_limit: int | None = None,
        regenerate: bool = True,
        temperatures: Sequence[float] = (0.0, 1.0),
        max_new_tokens: int = 96,
        generation_batch_size: int = 128,
        cache_dir: str | None = None,
        num_proc: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        store: str | None = None,
        benchmark: Sequence[str] = (),
    ) -> None:
        """Check the settings; nothing is read yet. ``limit`` and ``validation_limit`` count conversations.

        ``num_proc`` processes tokenize (None: one per core, at most 8); ``num_workers`` of each loader read rows. With
        ``store``, a directory, rows and hidden states come from there. ``benchmark`` holds questions: conversations
        that overlap with one are left out.
        """
        super().__init__()
        if batch_size < 1 or num_workers < 0:
            raise UserError(
                f"data.batch_size is {batch_size} and data.num_workers {num_workers}: expected a positive number of "
                "rows per device and no negative number of workers"
            )
        if num_proc is not None and num_proc < 1:
            raise UserError(f"data.num_proc is {num_proc}: expected a positive number of processes, or null")
        self.preparation = Preparation(
            source,
            {"train": limit, "validation": validation_limit},
            sequence_length,
            regenerate,
            RegenerationSettings(tuple(float(t) for t in temperatures), max_new_tokens, generation_batch_size, seed),
            Path(cache_dir).expanduser() if cache_dir else default_cache_dir(),
            num_proc or min(8, available_cores()),
            Benchmark(benchmark),
        )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.store_path = Path(store).expanduser() if store else None
        self._store: Store | None = None
        self._target: Target | None = None
        self._splits: dict[str, Split] = {}
        self._sampler: ResumableSampler | None = None
        self._resume: dict[str, Any] | None = None

    @classmethod
    def of_path(cls, path: str, source: Callable[[str], Source], **settings: Any) -> "DataModule":
        """The module whose source reads ``path``: so that the path of the data is a setting beside the others."""
        return cls(source(path), **settings)

    # --- preparation ------------------------------------------------------------------------------------------------

    def prepare(self, target: "Target", engine: Engine | None = None) -> None:
        """Read, regenerate (or find in the cache), tokenize, pack and count; or open the store. Raises UserError.

        ``engine`` lets the target answer; None: in this process.
        """
        self._target = target
        if self.store_path is None:
            with closing(engine or InProcess()) as answering:
                self._splits = {
                    split: self.preparation.prepare(target, split, answering) for split in ("train", "validation")
                }
            return
        self._store = Store(self.store_path)
        self._store.check(target, self.settings())
        self._splits = {split: self._stored_split(target, self._store, split) for split in self._store.rows}

    def check_reads(self, drafter: "Drafter") -> None:
        """Raises UserError if the drafter reads what the store, if there is one, does not hold."""
        if self._store is not None:
            self._store.origin.check(drafter.layers, drafter.reads_every_last)

    def settings(self) -> dict[str, Any]:
        """What decides the rows, besides the target: JSON-able, and recorded with a store."""
        return self.preparation.settings()

    def _stored_split(self, target: "Target", store: Store, split: str) -> Split:
        try:
            rows, about = store.rows[split], dict(store.contents.splits[split].about)
            besides = {name: about.pop(name) for name in BESIDES}
            report = PackingReport(**about)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"the store {store.path} does not describe its {split} rows ({error}): expected one as it was written"
            ) from error
        counts = torch.zeros(target.vocab_size, dtype=torch.int64)
        for batch in rows.blocks():
            counts += count_supervised(batch, target.vocab_size)
        return Split(rows, counts, report, **besides)

    # --- what the data holds ----------------------------------------------------------------------------------------

    @property
    def response_counts(self) -> Tensor:
        """How often each token id is to be learned in the training split, ``[V]`` int64."""
        return self._prepared("train").counts

    def draft_vocabulary(self, size: int | None) -> Tensor:
        """Sorted target ids ``[Vd]`` for a draft vocabulary of ``size`` (None: all), the end marks among them."""
        assert self._target is not None
        return build_draft_vocabulary(self.response_counts, size, self._target.eos_token_ids)

    def coverage(self, vocabulary: Tensor) -> dict[str, float]:
        """The share of supervised tokens of each split that lies in the draft vocabulary."""
        return {f"{split}_coverage": coverage(data.counts, vocabulary) for split, data in self._splits.items()}

    def evaluation_prompts(self, split: str, limit: int | None = None, max_new_tokens: int = 128) -> list[list[int]]:
        """Token ids of prompts to decode: a fair sample of those that leave room for ``max_new_tokens``."""
        return [ids for _, ids in self.evaluation_prompts_by_category(split, limit, max_new_tokens)]

    def evaluation_prompts_by_category(
        self, split: str, limit: int | None = None, max_new_tokens: int = 128
    ) -> list[tuple[str, list[int]]]:
        """The same prompts, each behind the category of its conversation."""
        if self._target is None:
            raise RuntimeError("call prepare(target) first")
        room = self._target.max_length - max_new_tokens
        found: list[tuple[str, list[int]]] = []
        refused: RefusedError | None = None
        for conversation in self.preparation.source.conversations(split):
            if limit is not None and len(found) == limit:
                break
            try:
                ids = opening_ids(self._target.tokenizer, conversation)
            except RefusedError as error:  # counted and reported when the rows were made
                refused = error
                continue
            if len(ids) <= room:
                found.append((conversation.category, ids))
        if not found and refused is not None:
            raise refused
        if not found:
            raise UserError(
                f"no {split} prompt of {self.preparation.source.name} leaves room for {max_new_tokens} new "
                f"tokens in the target's context of {self._target.max_length}: lower max_new_tokens"
            )
        return found

    @property
    def rows(self) -> dict[str, Rows]:
        """The packed rows by split: what a store is written of."""
        return {split: self._prepared(split).rows for split in self._splits}

    def about(self, split: str) -> dict[str, Any]:
        """What packing made of a split, its rows' fingerprint, and how many conversations were left out or cut."""
        data = self._prepared(split)
        return asdict(data.report) | {name: getattr(data, name) for name in BESIDES}

    def describe(self) -> dict[str, Any]:
        """The numbers that a run logs about its data."""
        about: dict[str, Any] = {
            "source": self.preparation.source.name,
            "regenerated": self.preparation.regenerate,
            "temperatures": list(self.preparation.generation.temperatures) if self.preparation.regenerate else [],
            "sequence_length": self.preparation.sequence_length,
            "hidden_states": f"stored in {self._store.contents.dtype}" if self._store else "computed",
        }
        for split in self._splits:
            about |= {f"{split}_{name}": value for name, value in self.about(split).items()}
        return about

    # --- loaders ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Batch]:
        """Whole batches in the sampler's order, from where a resumed run left it."""
        rows = self._prepared("train").rows
        rank, world_size = self._place()
        accumulate = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        sampler = ResumableSampler(len(rows), self.batch_size, self.seed, rank, world_size, accumulate)
        if self._resume is not None:
            if self._resume["data"] != self._prepared("train").fingerprint:
                raise UserError(
                    "the checkpoint was trained on other data: resume with the data settings of that run, or start anew"
                )
            sampler.load_state_dict(self._resume)
        self._sampler = sampler
        return self._loader("train", rows, sampler)

    def step_rows(self, batch_idx: int) -> Batch:
        """The rows ``[R, T]`` of this rank in the optimizer step that begins with batch ``batch_idx`` of the epoch."""
        return self._prepared("train").rows.__getitems__(self.step_row_numbers(batch_idx))

    def step_row_numbers(self, batch_idx: int) -> list[int]:
        """Their numbers among the training rows."""
        assert self._sampler is not None, "there are steps once there is a loader"
        return self._sampler.step_rows(batch_idx)

    def val_dataloader(self) -> DataLoader[Batch]:
        """All validation rows, dealt out over the ranks; rows of padding make the shares equal."""
        rows = self._prepared("validation").rows
        rank, world_size = self._place()
        missing = -len(rows) % (self.batch_size * world_size)
        return self._loader("validation", rows, range(rank, len(rows) + missing, world_size))

    def _loader(self, split: str, packed: Rows, order: Iterable[int]) -> DataLoader[Batch]:
        rows: Dataset[Batch] = packed
        if self._store is not None and self._target is not None:
            rows = StoredRows(self._store, split, self._target.dtype)
        return DataLoader(rows, self.batch_size, sampler=order, num_workers=self.num_workers, collate_fn=_as_it_is)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of batches, as Lightning's loop has counted it; rank-agnostic."""
        if self._sampler is None or self.trainer is None:
            return {}
        # Not "completed": checkpoints are written by hooks that run before Lightning counts that.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        place = self._sampler.state_dict(self.trainer.current_epoch, progress.processed)
        return {"data": self._prepared("train").fingerprint} | place

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there: takes effect when the training loader is made."""
        self._resume = state_dict or None

    def batches_done(self) -> int:
        """How many batches of its epoch a resumed run has behind it, as its own ranks take them."""
        _, world_size = self._place()
        return self._resume["rows"] // (self.batch_size * world_size) if self._resume else 0

    def _prepared(self, split: str) -> Split:
        if split not in self._splits:
            raise RuntimeError("call prepare(target) first")
        return self._splits[split]

    def _place(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


def _as_it_is(batch: Any) -> Any:
    return batch
