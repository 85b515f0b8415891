"""Files of conversations, data modules that read them, and what to compare of both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdraft.data.datamodule import DataModule
from specdraft.data.sources.base import SPLITS, Conversation
from specdraft.data.sources.conversations import Conversations
from specdraft.targets.batch import Batch


def chat(number: int, answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": answer}]}


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


def everything(source: Conversations) -> list[Conversation]:
    return [c for split in SPLITS for c in source.conversations(split)]


def messages(n: int) -> dict[str, Any]:
    words = "value " * (n % 17 + 1)
    return {"messages": [{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": f"return {words}"}]}


def module(path: str, cache: Path, *, max_malformed: int = 100, **options: Any) -> DataModule:
    source = Conversations(path, held_out=0.2, max_malformed=max_malformed)
    settings = {"regenerate": False, "sequence_length": 64, "num_proc": 1, "cache_dir": str(cache)}
    return DataModule(source, **settings | options)


def same(ours: Batch, theirs: Batch) -> bool:
    return all(torch.equal(value, vars(theirs)[name]) for name, value in vars(ours).items())


def files(cache: Path, name: str) -> list[Path]:
    return sorted(cache.glob(f"prepared/*/{name}"))
