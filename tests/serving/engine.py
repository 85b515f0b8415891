"""An engine without a model: rows of token ids, as vLLM's persistent batch keeps them, and answers known beforehand.

Rows are moved as vLLM moves them: one that ends leaves its row to the last, rows are swapped, prompts are read in
parts, a request may be taken out and come back, and nobody is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """prompt and its whole continuation, longer than ``limit``, the tokens after which it ends; what was counted."""

    prompt: list[int]
    continuation: list[int]
    limit: int
    emitted: int = 0
    read: int = 0  # tokens of the text that the target has read
    draft: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.continuation[: self.emitted]

    def step(self, part: int) -> list[int]:
        """The tokens of a step: of a prompt that is not read to its end none."""
        if self.read < len(self.text) - 1 or not self.emitted:
            self.read = min(self.read + part, len(self.text))
            if self.read < len(self.text):
                return []
            accepted = 0
        else:
            truth = self.continuation[self.emitted :]
            pairs = enumerate(zip(self.draft, truth, strict=False))
            accepted = next((i for i, (a, b) in pairs if a != b), len(self.draft))
            self.drafted.append(len(self.draft))
            self.accepted.append(accepted)
        found = self.continuation[self.emitted : self.emitted + accepted + 1]
        self.emitted += len(found)
        self.read = len(self.text) - 1
        return found


Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


def serve(
    propose: Propose,
    requests: Sequence[Request],
    rows: int,
    part: int = 1000,
    swaps: bool = False,
    away: Callable[[int], bool] = lambda step: False,
    width: int = 128,
) -> None:
    """Decode all, up to ``rows`` side by side. part: tokens of a prompt that a step reads. swaps: rows change places.
    away: in which steps the first request is left out."""
    waiting, batch = list(requests), list[Request]()
    lengths, ids = np.zeros(rows, dtype=np.int32), np.zeros((rows, width), dtype=np.int32)
    for step in range(10_000):
        while len(batch) < rows and waiting:
            batch.append(waiting.pop(0))
        if not batch:
            return
        if swaps and step % 2:
            batch.reverse()
        left_out = [batch.pop(0)] if len(batch) > 1 and away(step) else []
        sampled = [request.step(part) for request in batch]
        ids[:] = -1  # what lies behind a text is nobody's
        for row, request in enumerate(batch):
            lengths[row] = len(request.text)
            ids[row, : lengths[row]] = request.text
        for request, draft in zip(batch, propose(sampled, lengths, ids), strict=True):
            request.draft = draft
        for row in reversed(range(len(batch))):
            if batch[row].emitted >= batch[row].limit:
                batch[row] = batch[-1]
                batch.pop()
        batch += left_out
        for request in left_out:
            request.draft = []
    raise AssertionError("the requests do not end")
