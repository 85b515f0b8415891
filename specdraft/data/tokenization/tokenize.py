"""Conversations to token ids and loss masks, by several processes, in the order of the conversations.

The result does not depend on the number of processes: chunks of one size come back in the order in which they went out.
Only a few are under way at a time, so that memory does not grow with the data."""

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, NamedTuple

from specdraft.data.sources.base import Conversation, refusals
from specdraft.data.tokenization.cache import Flat, Notes, flatten
from specdraft.data.tokenization.chat import Example, example_from_words
from specdraft.errors import UserError

CHUNK = 64  # conversations: to send them takes a hundredth of the time to tokenize them


class Tokenized(NamedTuple):
    """A chunk: its examples, and the (id, reason) of each conversation that has no safe loss mask."""

    examples: Flat
    refused: list[tuple[str, str]]


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenized(
    tokenizer: Any, conversations: Iterable[Conversation], end_ids: Collection[int], num_proc: int
) -> Iterator[Tokenized]:
    """Chunk by chunk; ``num_proc`` 1 works in this process. Raises UserError if a process is killed."""
    rest = iter(conversations)
    chunks = iter(lambda: list(islice(rest, CHUNK)), [])
    if num_proc == 1:
        yield from (_tokenize(tokenizer, end_ids, chunk) for chunk in chunks)
        return
    # A tokenizer's own threads would fight with the processes for the cores, and do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(num_proc, initializer=_begin, initargs=(tokenizer, end_ids))
    waiting: deque[Future[Tokenized]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) >= 2 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        said = "a process that tokenizes was killed, most likely for want of memory: lower data.num_proc"
        raise UserError(said) from error
    finally:
        pool.shutdown(cancel_futures=True)


def accepted(chunks: Iterable[Tokenized], max_malformed: int, where: str, notes: Notes) -> Iterator[Flat]:
    """The examples; conversations (``where`` names them) without a safe loss mask are noted after the last. Raises
    UserError for more than ``max_malformed``; where there is nothing else, with what is wrong with the template."""
    refused: list[tuple[str, str]] = []
    good = 0
    for examples, unsafe in chunks:
        refused += unsafe
        good += len(examples.lengths)
        if len(refused) > max_malformed:
            break
        yield examples
    notes.counts["unsafe"] = len(refused)
    if not refused:
        return
    if not good:
        raise UserError(refused[0][1])
    if len(refused) > max_malformed:
        said = f"the first {good + len(refused)} {where} have no safe loss mask"
        raise UserError(refusals(refused, said, max_malformed))
    said = f"{good + len(refused)} {where} have no safe loss mask and are skipped"
    notes.warnings.append(refusals(refused, said))


def _tokenize(tokenizer: Any, end_ids: Collection[int], chunk: list[Conversation]) -> Tokenized:
    examples: list[Example] = []
    refused: list[tuple[str, str]] = []
    for conversation in chunk:
        try:
            examples.append(example_from_words(tokenizer, conversation, end_ids))
        except UserError as error:
            refused.append((conversation.id, str(error)))
    return Tokenized(flatten(examples), refused)


_worker: tuple[Any, Collection[int]]  # of a process of the pool


def _begin(tokenizer: Any, end_ids: Collection[int]) -> None:
    global _worker
    _worker = tokenizer, end_ids


def _work(chunk: list[Conversation]) -> Tokenized:
    return _tokenize(*_worker, chunk)
