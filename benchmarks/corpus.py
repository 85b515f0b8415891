"""Conversations for the benchmarks of data: the standard library's functions as two questions and two answers each."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdraft.data.datamodule import DataModule
from specdraft.data.sources import stdlib
from specdraft.data.sources.base import Source


def write_conversations(path: Path, size: int) -> int:
    """Write JSON Lines of at least ``size`` bytes, each line another conversation; returns how many there are."""
    functions = [f for name in stdlib.files() for f in stdlib.functions(stdlib.read(name), name)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, function in enumerate(itertools.cycle(functions)):
            written += file.write(json.dumps({"messages": list(_messages(number, function))}) + "\n")
            if written >= size:
                return number + 1
    raise AssertionError("a cycle does not end")


def _messages(number: int, function: stdlib.Function) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": f"{number}: complete this function.\n\n{function.prompt}"}
    yield {"role": "assistant", "content": function.body}
    yield {"role": "user", "content": f"Where is {function.name} defined?"}
    yield {"role": "assistant", "content": f"In {function.path}, line {function.line}."}


def data_module(source: Source, cache: Path, processes: int, **settings: Any) -> DataModule:
    """Conversations as they are, rows of 512 tokens, with its cache in ``cache``."""
    return DataModule(source, regenerate=False, num_proc=processes, cache_dir=str(cache), **settings)
