"""People's own conversations as a source: any file or data set in any of the formats of ``chat_formats.py``.

What decides about a conversation is its content, never where it stands. Its first question decides the split, so that
all answers to one question stay on one side; a digest of the whole decides its place in the shuffled order, so that one
of equal conversations is left, and adding, moving or sorting records changes nothing for the others."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from specdraft.data.sources.base import Conversation, Selection, check_request, digest
from specdraft.data.sources.chat_formats import CHAT_FORMATS, MalformedError, convert, recognize
from specdraft.data.sources.records import Record, RecordIndex, read_records
from specdraft.errors import UserError, warn

_FIRST_RECORDS = 100  # their format is taken for that of all
_LISTED = 20  # malformed records that the warning names


@dataclass
class Conversations:
    """Conversations or documents of ``path``: a JSONL, JSON or Parquet file, a folder of them, or a ``datasets`` name.

    ``form`` None recognizes the format from the first records. Records of another one are skipped, up to
    ``max_malformed``, and as many whose loss mask is not safe. ``held_out`` is the share of questions that validation
    and test get each. ``max_rows`` stops reading early, which streamed data sets want.

    The files are read when conversations are asked for: once from front to back, to learn where each conversation
    stands, and again where one is taken. Memory holds 40 bytes a conversation."""

    path: str
    form: str | None = None
    max_malformed: int = 100
    max_rows: int | None = None
    held_out: float = 0.05
    subset: str | None = None
    dataset_split: str = "train"
    streaming: bool = False

    def __post_init__(self) -> None:
        if self.form not in (None, *CHAT_FORMATS):
            raise UserError(f"data.source.form is {self.form!r}: expected one of {', '.join(CHAT_FORMATS)}, or null")
        if not 0 < self.held_out < 0.5 or self.max_malformed < 0 or (self.max_rows is not None and self.max_rows < 1):
            said = f"held_out={self.held_out}, max_malformed={self.max_malformed} and max_rows={self.max_rows}"
            raise UserError(f"data.source has {said}: expected a share below 0.5, 0 or more, and 1 or more or null")
        self.name = self.path

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """As ``Source`` says."""
        check_request(split, limit)
        index, form = self._found
        order, digests = index.shuffled(split)
        if not len(order):
            said = f"{self.name} has no conversations in its {split} split: expected more well-formed records"
            raise UserError(f"{said}, or another data.source.held_out ({self.held_out})")

        def read(place: int) -> Conversation:
            record = index.read(place)
            with suppress(MalformedError):
                conversation = _conversation(record, form)
                if digest(conversation) == index.digest(place):
                    return conversation
            raise UserError(f"{record.origin} changed while it was read: start again when the file is finished")

        return Selection(read, order[:limit], digests[:limit])

    @cached_property
    def _found(self) -> tuple[RecordIndex, str]:
        """Where all conversations stand, and their format. Raises UserError at the end if too many are malformed."""
        records = islice(read_records(self.name, self.subset, self.dataset_split, self.streaming), self.max_rows)
        first = list(islice(records, _FIRST_RECORDS))
        if not first:
            raise UserError(f"{self.name} is empty: expected a record for each conversation; check the path")
        form = self.form or self._recognize(first)
        index = RecordIndex()
        total, malformed = 0, 0
        listed = defaultdict[str, list[str]](list)  # malformed records by reason: people's mistakes repeat
        others = Counter[str]()  # their formats
        for record in chain(first, records):
            total += 1
            try:
                conversation = _conversation(record, form)
            except MalformedError as error:
                malformed += 1
                if malformed <= _LISTED:
                    listed[str(error)].append(record.origin)
                if self.form and (other := recognize(record.fields)) not in (None, form):
                    others[other] += 1
            else:
                index.add(record, self._split_of(conversation), digest(conversation))
        self._report(malformed, total, form, listed, next((o for o, n in others.items() if 2 * n > total), ""))
        return index, form

    def _recognize(self, records: list[Record]) -> str:
        forms = Counter(form for record in records if (form := recognize(record.fields)) is not None)
        if not forms:
            keys = sorted({key for record in records for key in record.fields})
            seen = f"have the keys {', '.join(keys)}" if keys else "are no objects"
            said = f"the form of {self.name} is unknown: its first records {seen}"
            raise UserError(f"{said}; expected messages, conversations, a prompt and its response, or text")
        return forms.most_common(1)[0][0]

    def _report(self, malformed: int, total: int, form: str, listed: Mapping[str, list[str]], other: str) -> None:
        """``listed``: malformed records by reason; ``other``: the format of most records, where it is another."""
        if not malformed:
            return
        use = ""
        if other:  # pairs have no data= of their own
            use = f"; the records look like {other}: use data={'conversations' if other == 'pair' else other}"
        reason, origins = next(iter(listed.items()))
        first = f"the first is {origins[0]} ({reason}){use}"
        if malformed == total:
            raise UserError(
                f"none of the {total} records of {self.name} is well-formed, expected the form {form}: {first}"
            )
        if malformed > self.max_malformed:
            said = f"{malformed} of {total} records of {self.name} are malformed"
            limit = f"data.source.max_malformed is {self.max_malformed}"
            raise UserError(f"{said}, and {limit}: mend them or raise it; {first}")
        named = ", ".join(f"{', '.join(origins)} ({reason})" for reason, origins in listed.items())
        more = f" and {malformed - _LISTED} more" if malformed > _LISTED else ""
        warn(f"{malformed} of {total} records of {self.name} are malformed and skipped: {named}{more}{use}")

    def _split_of(self, conversation: Conversation) -> str:
        """By what was asked first, in lower case and with single blanks; of a document, by its text."""
        asked = (message["content"] for message in conversation.prompt_messages if message["role"] == "user")
        question = " ".join(next(asked, conversation.response or "").lower().split())
        hashed = hashlib.sha256(question.encode()).digest()
        place = int.from_bytes(hashed[:6], "big") / 2**48
        return "test" if place < self.held_out else "validation" if place < 2 * self.held_out else "train"


def _conversation(record: Record, form: str) -> Conversation:
    if record.error:
        raise MalformedError(record.error)
    category = str(record.fields.get("category") or "uncategorized")
    messages, document, tools = convert(record.fields, form)
    if document is not None or messages[-1]["role"] != "assistant":
        return Conversation(record.origin, category, messages, document, tools=tools)
    extras = {key: value for key, value in messages[-1].items() if key not in ("role", "content")}
    cut = record.fields.get("cut") is True  # as `specdraft regenerate output=` says of an answer without an end
    return Conversation(record.origin, category, messages[:-1], messages[-1]["content"], extras, tools, cut)
