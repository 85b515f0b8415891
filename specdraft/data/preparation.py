"""From the conversations of a source to packed rows: answered or as they are, tokenized, written to disk, packed."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import transformers
from torch import Tensor
from tqdm import tqdm

from specdraft.data.packing import PackedRows, PackingReport, Rows, pack_flat
from specdraft.data.regeneration import Engine, RegenerationSettings, cache_key, regenerate
from specdraft.data.sources.base import Conversation, Selection, Source, list_ids
from specdraft.data.sources.decontamination import Benchmark
from specdraft.data.store.contents import tokenizer_hash
from specdraft.data.tokenization.cache import Examples, Flat, Notes, in_chunks, prepared
from specdraft.data.tokenization.chat import Example
from specdraft.data.tokenization.tokenize import CHUNK, accepted, tokenized

if TYPE_CHECKING:
    from specdraft.targets import Target


@dataclass(frozen=True)
class Split:
    """Packed rows and what was counted on the way to them."""

    rows: Rows
    counts: Tensor  # [V] supervised tokens by id
    report: PackingReport
    fingerprint: str  # of all rows
    overlapping: int  # conversations that hold what the benchmark asks
    left_out: int  # conversations whose prompt leaves no room for an answer
    shortened: int  # conversations that a later turn without room ended
    unfinished: int  # conversations that end at an answer that max_new_tokens cut
    dropped: int  # turns that were not asked for after such an answer
    unsafe: int  # conversations without a safe loss mask, or that the chat template refuses


# What a split counts beside what packing reports, and what tells its rows from others.
COUNTS = ("overlapping", "left_out", "shortened", "unfinished", "dropped", "unsafe")
BESIDES = ("fingerprint", *COUNTS)


@dataclass(frozen=True)
class Preparation:
    """What decides the rows, besides the target. ``limits`` count conversations by split; None takes all.

    ``num_proc`` processes tokenize. Conversations that overlap with the ``benchmark`` are left out.
    """

    source: Source
    limits: Mapping[str, int | None]
    sequence_length: int
    regenerate: bool
    generation: RegenerationSettings
    cache_dir: Path
    num_proc: int
    benchmark: Benchmark

    def settings(self) -> dict[str, Any]:
        """All of it, JSON-able, as recorded with a store."""
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

    def chosen(self, split: str) -> Iterator[Conversation]:
        """The conversations of a split, without those that hold what the benchmark asks."""
        return self._without_benchmark(self.source.conversations(split, self.limits[split]), Notes())

    def row_length(self, target: "Target") -> int:
        """Tokens in a packed row, of which the target must be able to read all."""
        return min(self.sequence_length, target.max_length)

    def prepare(self, target: "Target", split: str, engine: Engine) -> Split:
        """Read, regenerate (or find in the cache), tokenize, pack and count. Raises UserError."""
        found = self.source.conversations(split, self.limits[split])
        examples = prepared(
            self.cache_dir / "prepared",
            self._cache_key_fields(target, split, found),
            target.vocab_size,
            lambda notes: self._examples(target, split, found, engine, notes),
        )
        rows, report = pack_flat(Flat(examples.tokens, examples.lengths), examples.supervised, self.row_length(target))
        counts = {name: examples.notes.counts[name] for name in COUNTS}
        return Split(rows, examples.counts, report, _fingerprint(examples, rows), **counts)

    def _cache_key_fields(self, target: "Target", split: str, found: Selection) -> dict[str, Any]:
        """All that decides the examples."""
        regenerated = {
            "split": split,  # of which messages speak
            "answers": cache_key(target, self.generation, self.row_length(target)),
        }
        return {
            "conversations": found.fingerprint,
            "benchmark": self.settings()["benchmark"],
            "tokenizer": _tokenizer(target.tokenizer),
            "end": sorted(target.eos_token_ids),
            "max_malformed": self.source.max_malformed,
            "regenerated": regenerated if self.regenerate else None,
        }

    def _examples(self, target: "Target", split: str, found: Selection, engine: Engine, notes: Notes) -> Iterator[Flat]:
        """The examples of the conversations ``found``, in chunks."""
        notes.counts |= dict.fromkeys(COUNTS, 0)
        if self.regenerate:
            conversations = self._without_benchmark(found, notes)
            yield from in_chunks(self._regenerated(target, split, conversations, engine, notes))
        else:
            bar = tqdm(found, desc=f"preparing {split} conversations", unit="", unit_scale=True, dynamic_ncols=True)
            conversations = self._without_benchmark(bar, notes)
            processes = min(self.num_proc, -(-len(found) // CHUNK))
            chunks = tokenized(target.tokenizer, conversations, target.eos_token_ids, processes)
            where = f"{split} conversations of {self.source.name}"
            yield from accepted(chunks, self.source.max_malformed, where, notes)
        if notes.counts["overlapping"]:
            notes.warnings.append(
                f"{notes.counts['overlapping']} of {len(found)} {split} conversations hold what the benchmark asks and "
                "are left out"
            )

    def _without_benchmark(self, conversations: Iterable[Conversation], notes: Notes) -> Iterator[Conversation]:
        for conversation in conversations:
            if self.benchmark.overlaps(conversation):
                notes.counts["overlapping"] += 1
            else:
                yield conversation

    def _regenerated(
        self, target: "Target", split: str, conversations: Iterable[Conversation], engine: Engine, notes: Notes
    ) -> Iterator[Example]:
        """What the target answers, turn by turn."""
        done = regenerate(
            target,
            conversations,
            self.generation,
            self.cache_dir,
            self.row_length(target),
            f"{split} conversations",
            engine,
            self.source.max_malformed,
        )
        counts = {name: getattr(done.counts, name) for name in ("left_out", "shortened", "unfinished", "dropped")}
        notes.counts |= counts | {"unsafe": done.counts.refused}
        if done.refused:
            names = list_ids([name for name, _ in done.refused])
            notes.warnings.append(
                f"{len(done.refused)} of {done.counts.conversations} {split} conversations of {self.source.name} are "
                f"refused by the target's chat template and end there ({names}): {done.refused[0][1]}"
            )
        yield from done.examples()


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


def _fingerprint(examples: Examples, rows: PackedRows) -> str:
    """Of all rows, without reading them: what the tokens are, and where each stands."""
    return hashlib.sha256(examples.checksum.encode() + rows.digest()).hexdigest()[:16]


def _tokenizer(tokenizer: Any) -> str:
    """A hash of all that decides how conversations become token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else tokenizer_hash(tokenizer)
    if isinstance(parts, dict):  # these two are left from the last call
        parts |= {"truncation": None, "padding": None}
    special = [getattr(tokenizer, name, None) for name in ("chat_template", "bos_token_id", "eos_token_id")]
    decisive = [parts, special, transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
