"""People's own conversations as a source: any file or data set in any of the forms of ``forms.py``.

What decides about a conversation is what it says, never where it stands. Its first question decides the split, so that
all answers to one question stay on one side; the hash of the whole decides its place in the fair order, so that of
equal conversations one is left, and adding, moving or sorting rows changes nothing for the others.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from specdraft.data.forms import FORM_NAMES, MalformedError, convert, recognise
from specdraft.data.rows import Raw, read_rows
from specdraft.data.source import Conversation, Message, check_request
from specdraft.errors import UserError

_FIRST_ROWS = 100  # that are asked for their form
_LISTED = 20  # malformed rows that the warning names


class Conversations:
    """Conversations or documents of ``path``: a JSONL, JSON or Parquet file, a folder of them, or a ``datasets`` name.

    Memory holds what a limit asks for, whatever the size of the files.
    """

    def __init__(
        self,
        path: str,
        form: str | None = None,
        max_malformed: int = 100,
        max_rows: int | None = None,
        held_out: float = 0.05,
        subset: str | None = None,
        dataset_split: str = "train",
        streaming: bool = False,
    ) -> None:
        """Check the settings; nothing is read yet.

        ``form`` None recognises it from the first rows. Rows that are none of the form are skipped, up to
        ``max_malformed``. ``held_out`` is the share of questions that validation and test get each. ``max_rows`` stops
        reading early, which streamed data sets want.
        """
        if form is not None and form not in FORM_NAMES:
            raise UserError(f"data.source.form is {form!r}: expected one of {', '.join(FORM_NAMES)}, or null")
        if not 0 < held_out < 0.5 or max_malformed < 0 or (max_rows is not None and max_rows < 1):
            raise UserError(
                f"data.source has held_out={held_out}, max_malformed={max_malformed} and max_rows={max_rows}: expected "
                "a share between 0 and 0.5, a number from 0 upwards, and a positive number or null"
            )
        self.name = path
        self.form = form
        self.max_malformed = max_malformed
        self.max_rows = max_rows
        self.held_out = held_out
        self.subset = subset
        self.dataset_split = dataset_split
        self.streaming = streaming
        self._warned = False

    def conversations(self, split: str, limit: int | None = None) -> list[Conversation]:
        """The conversations of a split, in a fixed and fair order, at most ``limit``. Raises UserError."""
        check_request(split, limit)
        found: dict[bytes, Conversation] = {}
        for conversation in self._read():
            if self._split_of(conversation) == split:
                found.setdefault(_digest(conversation), conversation)
                if limit is not None and len(found) >= 2 * limit:
                    found = {digest: found[digest] for digest in sorted(found)[:limit]}
        if not found:
            raise UserError(
                f"{self.name} has no conversations in its {split} split: expected more well-formed rows, of which "
                f"data.source.held_out={self.held_out} go to validation and as many to test"
            )
        return [found[digest] for digest in sorted(found)[:limit]]

    def _read(self) -> Iterator[Conversation]:
        """All conversations, in the order of the rows. Raises UserError at the end if too many rows are malformed."""
        rows = islice(read_rows(self.name, self.subset, self.dataset_split, self.streaming), self.max_rows)
        first = list(islice(rows, _FIRST_ROWS))
        form = self.form or self._recognise(first)
        total, malformed, listed = 0, 0, list[str]()
        for raw in (row for part in (first, rows) for row in part):
            total += 1
            try:
                yield _conversation(raw, form)
            except MalformedError as error:
                malformed += 1
                if len(listed) < _LISTED:
                    listed.append(f"{raw.origin} ({error})")
        self._report(malformed, total, listed)

    def _recognise(self, rows: list[Raw]) -> str:
        """The form of most of the first rows."""
        forms = Counter(form for raw in rows if not raw.error and (form := recognise(raw.row)) is not None)
        if not forms:
            keys = sorted({key for raw in rows for key in raw.row})
            seen = f"have the keys {', '.join(keys)}" if keys else "are no objects" if rows else "do not exist"
            raise UserError(
                f"the form of {self.name} is unknown: its first rows {seen}; expected messages, conversations, "
                "a prompt and its response, or text"
            )
        return forms.most_common(1)[0][0]

    def _report(self, malformed: int, total: int, listed: list[str]) -> None:
        if malformed > self.max_malformed:
            raise UserError(
                f"{malformed} of {total} rows of {self.name} are malformed, and data.source.max_malformed is "
                f"{self.max_malformed}: mend them or raise it; the first is {listed[0]}"
            )
        if malformed and not self._warned:
            more = f" and {malformed - len(listed)} more" if malformed > len(listed) else ""
            warnings.warn(
                f"{malformed} of {total} rows of {self.name} are malformed and skipped: {', '.join(listed)}{more}",
                stacklevel=2,
            )
            self._warned = True

    def _split_of(self, conversation: Conversation) -> str:
        digest = hashlib.sha256(_question(conversation).encode()).digest()
        place = int.from_bytes(digest[:6], "big") / 2**48
        return "test" if place < self.held_out else "validation" if place < 2 * self.held_out else "train"


def _conversation(raw: Raw, form: str) -> Conversation:
    """Raises MalformedError."""
    if raw.error:
        raise MalformedError(raw.error)
    category = str(raw.row.get("category") or "uncategorized")
    messages, document, tools = convert(raw.row, form)
    if document is not None or messages[-1]["role"] != "assistant":
        return Conversation(raw.origin, category, messages, document, tools=tools)
    extras = {key: value for key, value in messages[-1].items() if key not in ("role", "content")}
    return Conversation(raw.origin, category, messages[:-1], messages[-1]["content"], extras, tools)


def _question(conversation: Conversation) -> str:
    """What was asked first, in lower case and with single blanks; of a document, its text."""
    asked = (message["content"] for message in conversation.prompt_messages if message["role"] == "user")
    return " ".join(next(asked, conversation.response or "").lower().split())


def _digest(conversation: Conversation) -> bytes:
    said: list[Message | str] = [*conversation.messages, *conversation.tools]
    if not conversation.prompt_messages:
        said = [conversation.response or ""]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
