"""Files of conversations, and all that a source finds in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdraft.data.sources.base import SPLITS, Conversation
from specdraft.data.sources.conversations import Conversations


def chat(number: int, answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": answer}]}


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


def everything(source: Conversations) -> list[Conversation]:
    return [c for split in SPLITS for c in source.conversations(split)]
