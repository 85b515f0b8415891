"""From the conversations of a source to packed sequences: answered or as they are, tokenized, kept on disk, packed."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from torch import Tensor
from tqdm import tqdm

from specdraft.data.bucket import is_url
from specdraft.data.packing import PackedData, pack_flat
from specdraft.data.regeneration.cache import Regeneration, cache_key, regenerate
from specdraft.data.regeneration.dialogue import Outcome
from specdraft.data.regeneration.questions import normalized
from specdraft.data.regeneration.request import Engine, RegenerationSettings
from specdraft.data.sources.base import Conversation, Selection, Source, refusals
from specdraft.data.sources.decontamination import Benchmark
from specdraft.data.tokenization.cache import Flat, Notes, cached_examples, in_chunks
from specdraft.data.tokenization.chat import tokenizer_fingerprint
from specdraft.data.tokenization.tokenize import CHUNK, accepted, available_cores, tokenized
from specdraft.decoding.served import SERVED
from specdraft.errors import UserError, check_switch, check_whole_number
from specdraft.files import cache_directory
from specdraft.targets import Target
from specdraft.targets.chat_template import options_of
from specdraft.text import counted, fingerprint

# Conversations that hold what the benchmark asks; without room for an answer; ended by a turn without room; ended by
# an answer that max_new_tokens cut; turns not asked for after it; without a safe loss mask or refused by the template;
# ended by a question of the target's own that was not worth asking; with one that an earlier conversation has.
COUNTS = ("overlapping", "left_out", "shortened", "unfinished", "dropped", "unsafe", "rejected", "repeated")
# What the line about the data calls them, the frequent ones first.
_SAID = {
    "unfinished": "answers cut at data.max_new_tokens={max_new_tokens}",
    "dropped": "turns dropped after them",
    "left_out": "conversations without room for an answer",
    "shortened": "conversations shortened to the room",
    "unsafe": "conversations without a safe loss mask",
    "overlapping": "conversations that hold what the benchmark asks",
    "rejected": "questions of the target's own that were not asked",
    "repeated": "questions asked before",
}


@dataclass(frozen=True)
class Split:
    """Packed sequences, how often each id is to be learned ``[V]``, and what is logged about them (JSON-able).
    ``about`` has the packing report, the ``COUNTS``, and the ``fingerprint`` of all sequences."""

    data: PackedData
    counts: Tensor
    about: dict[str, Any]


@dataclass(frozen=True)
class Preparation:
    """What decides the packed sequences, besides the target; the settings of ``data=``.
    ``limit`` and ``validation_limit`` count conversations; None takes all. ``num_proc`` processes tokenize (None: one
    per core, at most 8). ``benchmark`` holds questions: conversations that overlap with one are left out."""

    source: Source
    sequence_length: int = 512
    limit: int | None = None
    validation_limit: int | None = None
    regenerate: bool = True
    temperatures: Sequence[float | str] = (0.0, 1.0)
    max_new_tokens: int = 96
    generation_batch_size: int = 128
    seed: int = 0
    cache_dir: str | None = None
    share: str | None = None
    num_proc: int | None = None
    benchmark: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, least, meaning in (
            ("sequence_length", 2, "the tokens of a packed sequence"),
            ("max_new_tokens", 1, "the tokens of a regenerated answer"),
            ("generation_batch_size", 1, "the answers that are decoded side by side"),
        ):
            check_whole_number(f"data.{name}", getattr(self, name), least, meaning)
        for name, meaning in (
            ("limit", "conversations to train on, or null for all"),
            ("validation_limit", "conversations for validation, or null for all"),
            ("num_proc", "processes that tokenize, or null for one per core"),
        ):
            if (value := getattr(self, name)) is not None:
                check_whole_number(f"data.{name}", value, 1, meaning)
        check_switch("data.regenerate", self.regenerate)
        if self.share is not None and not is_url(self.share):
            said = f"data.share is {self.share!r}: expected the URL of a bucket's folder, such as s3://BUCKET/answers"
            raise UserError(f"{said}; processes that see one disk share data.cache_dir")
        _ = self.generation

    @cached_property
    def generation(self) -> RegenerationSettings:
        """How the target answers. Raises UserError."""
        try:
            temperatures = tuple(each if each == SERVED else float(each) for each in self.temperatures)
        except (TypeError, ValueError):
            said = f"data.temperatures is {self.temperatures}"
            wanted = f"expected a list of numbers from 0 upwards, as [0,1], or among them {SERVED}"
            raise UserError(f"{said}: {wanted}") from None
        return RegenerationSettings(temperatures, self.max_new_tokens, self.generation_batch_size, self.seed)

    @cached_property
    def questions(self) -> Benchmark:
        """Those of the benchmark, for comparison."""
        return Benchmark(self.benchmark)

    @property
    def cache(self) -> Path:
        """Where answers and examples are kept: ``cache_dir``, ``$SPECDRAFT_CACHE``, or ``~/.cache/specdraft``."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else cache_directory()

    def settings(self) -> dict[str, Any]:
        """All that decides the sequences, JSON-able, as recorded with a store."""
        decisive = {
            "source": _plain(self.source),
            "limit": self.limit,
            "validation_limit": self.validation_limit,
            "sequence_length": self.sequence_length,
            "regenerate": self.regenerate,
            "generation": asdict(self.generation) if self.regenerate else None,
            "benchmark": fingerprint(sorted(self.questions.questions)),
        }
        return json.loads(json.dumps(decisive))

    def conversations(self, split: str) -> Selection:
        """The conversations of a split, up to its limit. Raises UserError."""
        return self.source.conversations(split, self.limit if split == "train" else self.validation_limit)

    def sizes(self) -> dict[str, int]:
        """How many conversations the splits have; ``test``, which nothing is learned from, may have none. Raises
        UserError if one of the others has none, before the first is answered."""
        sizes = {split: len(self.conversations(split)) for split in ("train", "validation")}
        with suppress(UserError):
            sizes["test"] = len(self.source.conversations("test"))
        return sizes

    def summary(self, sizes: Mapping[str, int], about: Sequence[Mapping[str, Any]]) -> str:
        """One line about what was prepared. ``about``: of each prepared split."""
        held_out = f", {sizes['test']:,} held out" if "test" in sizes else ""
        counts = {name: sum(split[name] for split in about) for name in _SAID}
        amiss = ", ".join(f"{_SAID[name]}: {number:,}" for name, number in counts.items() if number)
        amiss = amiss.format(max_new_tokens=self.max_new_tokens)
        learned = f"{counted(sizes['train'], 'conversation')} to train on, {sizes['validation']:,} for validation"
        return f"data: {learned}{held_out}{f' ({amiss})' if amiss else ''}"

    def without_benchmark(self, conversations: Iterable[Conversation], notes: Notes) -> Iterator[Conversation]:
        """Those that do not overlap with the benchmark; the others are counted."""
        for conversation in conversations:
            if self.questions.overlaps(conversation):
                notes.counts["overlapping"] = notes.counts.get("overlapping", 0) + 1
            else:
                yield conversation

    def answers(self, target: Target, split: str, engine: Engine, notes: Notes) -> Regeneration:
        """The target's answers to the conversations of a split, by ``engine`` or from the cache. Raises UserError."""
        asked, said = self.without_benchmark(self.conversations(split), notes), f"{split} conversations"
        room, limit = self._length(target), self.source.max_malformed
        return regenerate(target, asked, self.generation, self.cache, room, said, engine, limit, self.share)

    def answered(self, outcomes: Iterable[Outcome], notes: Notes) -> Iterator[Outcome]:
        """The outcomes; those whose questions the target wrote are emptied, and counted, where an earlier one has the
        same or where they overlap with the benchmark."""
        asked = set[str]()
        for outcome in outcomes:
            questions = set(map(normalized, outcome.questions))
            amiss = "repeated" if questions & asked else "overlapping" if self.questions.holds(questions) else ""
            asked |= questions
            if amiss and outcome.examples:
                notes.counts[amiss] = notes.counts.get(amiss, 0) + 1
            yield Outcome(outcome.id) if amiss else outcome

    def prepare(self, target: Target, split: str, engine: Engine) -> Split:
        """Read, regenerate (or find in the cache), tokenize, pack and count. Raises UserError."""
        key, make = self._cache_key_fields(target, split), partial(self._examples, target, split, engine)
        examples = cached_examples(self.cache / "prepared", key, target.vocab_size, make)
        packed, report = pack_flat(examples.flat, self._length(target))
        about = asdict(report) | {"fingerprint": fingerprint([examples.fingerprint, packed.digest().hex()])}
        return Split(packed, examples.counts, about | {name: examples.notes.counts[name] for name in COUNTS})

    def _length(self, target: Target) -> int:
        """Tokens in a packed sequence, of which the target must be able to read all."""
        return min(self.sequence_length, target.max_length)

    def _cache_key_fields(self, target: Target, split: str) -> dict[str, Any]:
        """All that decides the examples; the split is named in messages that are kept with them."""
        return {
            "conversations": self.conversations(split).fingerprint,
            "benchmark": self.settings()["benchmark"],
            "tokenizer": _tokenizer(target.tokenizer),
            "end": sorted(target.eos_token_ids),
            "max_malformed": self.source.max_malformed,
            "answers": [split, cache_key(target, self.generation, self._length(target))] if self.regenerate else None,
        }

    def _examples(self, target: Target, split: str, engine: Engine, notes: Notes) -> Iterator[Flat]:
        notes.counts |= dict.fromkeys(COUNTS, 0)
        found, where = self.conversations(split), f"{split} conversations of {self.source.name}"
        if self.regenerate:
            done = self.answers(target, split, engine, notes)
            notes.counts |= {name: getattr(done.counts, name) for name in COUNTS if hasattr(done.counts, name)}
            notes.counts["unsafe"] = done.counts.refused
            if done.refused:
                said = f"{done.counts.conversations} {where} are refused by the target's chat template and end there"
                notes.warnings.append(refusals(done.refused, said))
            kept = self.answered(done.outcomes(), notes)
            yield from in_chunks(example for outcome in kept for example in outcome.as_examples())
        else:
            bar = tqdm(found, desc=f"preparing {split} conversations", unit="", unit_scale=True, dynamic_ncols=True)
            processes = min(self.num_proc or min(8, available_cores()), -(-len(found) // CHUNK))
            conversations = self.without_benchmark(bar, notes)
            chunks = tokenized(target.tokenizer, conversations, target.eos_token_ids, processes)
            yield from accepted(chunks, self.source.max_malformed, where, notes)
        if overlapping := notes.counts["overlapping"]:
            said = f"{overlapping} of {len(found)} {split} conversations hold what the benchmark asks and are left out"
            notes.warnings.append(said)


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


def _tokenizer(tokenizer: Any) -> str:
    """A hash of all that decides how conversations become token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else tokenizer_fingerprint(tokenizer)
    if isinstance(parts, dict):  # these two are left from the last call
        parts |= {"truncation": None, "padding": None}
    options = options_of(tokenizer)
    special = [getattr(tokenizer, name, None) for name in ("chat_template", "bos_token_id", "eos_token_id")]
    versions = [transformers.__version__, tokenizers.__version__]
    return fingerprint([parts, special, *versions, *([options] if options else [])])
