"""The DataModule: everything between a source and batches, done before training starts.

R = rows, T = tokens in a row, V = target vocabulary.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from specdraft.data.chat import example_from_ids, example_from_words, opening_ids
from specdraft.data.overlap import Benchmark
from specdraft.data.packing import PackingReport, pack, padding_rows
from specdraft.data.regenerate import RegenerationSettings, default_cache_dir, regenerate
from specdraft.data.sampler import ResumableSampler
from specdraft.data.source import Conversation, Source
from specdraft.data.store import Store, StoredRows
from specdraft.data.vocabulary import build_draft_vocabulary, count_supervised, coverage
from specdraft.drafters.batch import Batch
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.targets import Target


class PackedRows(Dataset[Batch]):
    """Packed rows ``[R, T]``, taken several at a time."""

    def __init__(self, rows: Batch) -> None:
        """Keep all rows in memory: 25 bytes a token."""
        self.rows = rows

    def __len__(self) -> int:
        """R."""
        return self.rows.input_ids.shape[0]

    def __getitem__(self, index: int) -> Batch:
        """One row, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows at ``indices``, as a batch: the loader asks for a whole batch at once."""
        chosen, rows = torch.tensor(indices), self.rows
        return Batch(
            rows.input_ids[chosen], rows.position_ids[chosen], rows.document_ids[chosen], rows.loss_mask[chosen]
        )


@dataclass(frozen=True)
class _Split:
    rows: Batch
    counts: Tensor  # [V] supervised tokens by id
    report: PackingReport
    overlapping: int  # conversations that hold what the benchmark asks
    left_out: int  # conversations whose prompt leaves no room for an answer
    unfinished: int  # regenerated responses that max_new_tokens cut


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
        num_workers: int = 0,
        seed: int = 0,
        store: str | None = None,
        benchmark: Sequence[str] = (),
    ) -> None:
        """Check the settings; nothing is read yet. ``limit`` and ``validation_limit`` count conversations.

        With ``store``, a directory, rows and hidden states come from there. ``benchmark`` holds questions:
        conversations that overlap with one are left out.
        """
        super().__init__()
        if batch_size < 1 or num_workers < 0:
            raise UserError(
                f"data.batch_size is {batch_size} and data.num_workers {num_workers}: expected a positive number of "
                "rows per device and no negative number of workers"
            )
        self.source = source
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.limits = {"train": limit, "validation": validation_limit}
        self.regenerate = regenerate
        self.generation = RegenerationSettings(
            tuple(float(t) for t in temperatures), max_new_tokens, generation_batch_size, seed
        )
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.num_workers = num_workers
        self.seed = seed
        self.store_path = Path(store).expanduser() if store else None
        self._store: Store | None = None
        self.benchmark = Benchmark(benchmark)
        self._target: Target | None = None
        self._splits: dict[str, _Split] = {}
        self._sampler: ResumableSampler | None = None
        self._resume: dict[str, Any] | None = None

    @classmethod
    def of_path(cls, path: str, source: Callable[[str], Source], **settings: Any) -> "DataModule":
        """The module whose source reads ``path``: so that the path of the data is a setting beside the others."""
        return cls(source(path), **settings)

    # --- preparation ------------------------------------------------------------------------------------------------

    def prepare(self, target: "Target") -> None:
        """Read, regenerate (or find in the cache), tokenise, pack and count; or open the store. Raises UserError."""
        self._target = target
        if self.store_path is None:
            self._splits = {split: self._prepare_split(target, split) for split in ("train", "validation")}
            return
        self._store = Store(self.store_path)
        self._store.check(target, self.settings())
        self._splits = {split: self._stored_split(target, self._store, split) for split in self._store.rows}

    def settings(self) -> dict[str, Any]:
        """What decides the rows, besides the target: JSON-able, and recorded with a store."""
        decisive = {
            "source": _plain(self.source),
            "limit": self.limits["train"],
            "validation_limit": self.limits["validation"],
            "sequence_length": self.sequence_length,
            "regenerate": self.regenerate,
            "generation": asdict(self.generation) if self.regenerate else None,
            "benchmark": hashlib.sha256(repr(sorted(self.benchmark.questions)).encode()).hexdigest()[:16],
        }
        return json.loads(json.dumps(decisive))

    def _prepare_split(self, target: "Target", split: str) -> _Split:
        found = self.source.conversations(split, self.limits[split])
        conversations = [c for c in found if not self.benchmark.overlaps(c)]
        overlapping = len(found) - len(conversations)
        if overlapping:
            warnings.warn(
                f"{overlapping} of {len(found)} {split} conversations hold what the benchmark asks and are left out",
                stacklevel=2,
            )
        left_out, unfinished = 0, 0
        if self.regenerate:
            prompts = self._prompts_with_room(target, split, conversations)
            left_out = len(conversations) - len(prompts)
            description = f"target answers {split} prompts"
            responses = regenerate(target, prompts, self.generation, self.cache_dir, description)
            examples = [example_from_ids(p, r) for p, r in zip(prompts, responses, strict=True)]
            unfinished = sum(response[-1] not in target.eos_token_ids for response in responses)
        else:
            examples = [example_from_words(target.tokenizer, c, target.eos_token_ids) for c in conversations]
        rows, report = pack(examples, min(self.sequence_length, target.max_length))
        counts = count_supervised(rows, target.vocab_size)
        return _Split(rows, counts, report, overlapping, left_out, unfinished)

    def _stored_split(self, target: "Target", store: Store, split: str) -> _Split:
        rows, about = store.rows[split], dict(store.contents.splits[split].about)
        counts = {name: about.pop(name) for name in ("overlapping", "left_out", "unfinished")}
        return _Split(rows, count_supervised(rows, target.vocab_size), PackingReport(**about), **counts)

    def _prompts_with_room(
        self, target: "Target", split: str, conversations: Sequence[Conversation]
    ) -> list[list[int]]:
        """Token ids of the prompts that leave room for an answer in a row."""
        room = min(self.sequence_length, target.max_length) - self.generation.max_new_tokens
        rendered = (opening_ids(target.tokenizer, c) for c in conversations)
        prompts = [ids for ids in rendered if len(ids) <= room]
        if not prompts:
            raise UserError(
                f"none of the {len(conversations)} {split} conversations fits data.sequence_length="
                f"{self.sequence_length} with {self.generation.max_new_tokens} tokens of answer: raise it or lower "
                "data.max_new_tokens"
            )
        return prompts

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
        if self._target is None:
            raise RuntimeError("call prepare(target) first")
        room = self._target.max_length - max_new_tokens
        found: list[list[int]] = []
        for conversation in self.source.conversations(split):
            if limit is not None and len(found) == limit:
                break
            ids = opening_ids(self._target.tokenizer, conversation)
            if len(ids) <= room:
                found.append(ids)
        if not found:
            raise UserError(
                f"no {split} prompt of {self.source.name} leaves room for {max_new_tokens} new tokens in the target's "
                f"context of {self._target.max_length}: lower max_new_tokens"
            )
        return found

    @property
    def rows(self) -> dict[str, Batch]:
        """The packed rows ``[R, T]`` by split."""
        return {split: self._prepared(split).rows for split in self._splits}

    def about(self, split: str) -> dict[str, Any]:
        """What packing made of a split, and how many conversations were left out or cut."""
        data = self._prepared(split)
        counts = {name: getattr(data, name) for name in ("overlapping", "left_out", "unfinished")}
        return asdict(data.report) | counts

    def describe(self) -> dict[str, Any]:
        """The numbers that a run logs about its data."""
        about: dict[str, Any] = {
            "source": self.source.name,
            "regenerated": self.regenerate,
            "temperatures": list(self.generation.temperatures) if self.regenerate else [],
            "sequence_length": self.sequence_length,
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
        sampler = ResumableSampler(len(PackedRows(rows)), self.batch_size, self.seed, rank, world_size)
        if self._resume is not None:
            if self._resume["data"] != self._fingerprint():
                raise UserError(
                    "the checkpoint was trained on other data: resume with the data settings of that run, or start anew"
                )
            sampler.load_state_dict(self._resume)
        self._sampler = sampler
        return self._loader("train", PackedRows(rows), sampler)

    def val_dataloader(self) -> DataLoader[Batch]:
        """All validation rows, dealt out over the ranks; rows of padding make the shares equal."""
        rows = self._prepared("validation").rows
        rank, world_size = self._place()
        missing = -len(PackedRows(rows)) % (self.batch_size * world_size)
        rows = _join(rows, padding_rows(missing, rows.input_ids.shape[1]))
        mine = range(rank, len(PackedRows(rows)), world_size)
        return self._loader("validation", PackedRows(rows), mine)

    def _loader(self, split: str, packed: PackedRows, order: Iterable[int]) -> DataLoader[Batch]:
        rows: Dataset[Batch] = packed
        if self._store is not None and self._target is not None:
            rows = StoredRows(self._store, split, packed, self._target.dtype)
        return DataLoader(rows, self.batch_size, sampler=order, num_workers=self.num_workers, collate_fn=_as_it_is)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of batches, as Lightning's loop has counted it; rank-agnostic."""
        if self._sampler is None or self.trainer is None:
            return {}
        # Not "completed": checkpoints are written by hooks that run before Lightning counts that.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        place = self._sampler.state_dict(self.trainer.current_epoch, progress.processed)
        return {"data": self._fingerprint()} | place

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there: takes effect when the training loader is made."""
        self._resume = state_dict or None

    def _fingerprint(self) -> str:
        """Of the training rows: equal counts of rows do not make equal data."""
        return hashlib.sha256(self._prepared("train").rows.input_ids.numpy().tobytes()).hexdigest()[:16]

    def _prepared(self, split: str) -> _Split:
        if split not in self._splits:
            raise RuntimeError("call prepare(target) first")
        return self._splits[split]

    def _place(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


def _plain(value: Any) -> Any:
    """A source, or sources within it, as its kind and its settings: JSON-able, and the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "conversations"):
        settings = {key: _plain(item) for key, item in vars(value).items() if not key.startswith("_")}
        return {"kind": type(value).__name__, "name": value.name} | settings
    return value if isinstance(value, bool | int | float | None) else str(value)


def _as_it_is(batch: Any) -> Any:
    return batch


def _join(first: Batch, second: Batch) -> Batch:
    return Batch(
        torch.cat([first.input_ids, second.input_ids]),
        torch.cat([first.position_ids, second.position_ids]),
        torch.cat([first.document_ids, second.document_ids]),
        torch.cat([first.loss_mask, second.loss_mask]),
    )
