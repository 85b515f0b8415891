"""Conversations to token ids and loss masks, by several processes, in the order of the conversations.

The result does not depend on the number of processes: conversations go out in chunks of one size, and the chunks come
back in their order. At any time only a few chunks are under way, so that memory does not grow with the data.
"""

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, NamedTuple

from specdraft.data.sources.base import Conversation, list_ids
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
    try:
        yield from _in_order(pool, chunks, under_way=2 * num_proc)
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenizes was killed, most likely for want of memory: lower data.num_proc"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def accepted(chunks: Iterable[Tokenized], max_malformed: int, where: str, notes: Notes) -> Iterator[Flat]:
    """The examples; conversations without a safe loss mask are noted after the last.

    ``where`` names the conversations. Raises UserError where there are more than ``max_malformed``; where there is
    nothing else, the template is at fault, and the error says what is wrong with it.
    """
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
    reason = refused[0][1]
    if not good:
        raise UserError(reason)
    names = list_ids([name for name, _ in refused])
    if len(refused) > max_malformed:
        raise UserError(
            f"{len(refused)} of the first {good + len(refused)} {where} have no safe loss mask ({names}), and "
            f"data.source.max_malformed is {max_malformed}: mend them or raise it; the first is {reason}"
        )
    notes.warnings.append(
        f"{len(refused)} of {good + len(refused)} {where} have no safe loss mask and are skipped ({names}): {reason}"
    )


_worker: tuple[Any, Collection[int]]


def _begin(tokenizer: Any, end_ids: Collection[int]) -> None:
    global _worker
    _worker = tokenizer, end_ids


def _work(chunk: list[Conversation]) -> Tokenized:
    return _tokenize(*_worker, chunk)


def _tokenize(tokenizer: Any, end_ids: Collection[int], chunk: list[Conversation]) -> Tokenized:
    examples: list[Example] = []
    refused: list[tuple[str, str]] = []
    for conversation in chunk:
        try:
            examples.append(example_from_words(tokenizer, conversation, end_ids))
        except UserError as error:
            refused.append((conversation.id, str(error)))
    return Tokenized(flatten(examples), refused)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[list[Conversation]], under_way: int) -> Iterator[Tokenized]:
    waiting: deque[Future[Tokenized]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(_work, chunk))
        if len(waiting) >= under_way:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
