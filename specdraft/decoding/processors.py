"""What becomes of the target's logits before a token is chosen: penalties, then a grammar, both of every request.

B = requests, N = nodes of a draft, n = tokens emitted in a round, V = vocabulary."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specdraft.decoding.grammar import Followed, Speaker
from specdraft.decoding.penalties import Penalties
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.tree import DraftTrees


class Processors:
    """Those that the sampling settings ask for, for requests side by side. masks_drafts: where these stand in a grammar
    that drafts are made under, too."""

    def __init__(self, sampling: Sampling, target: Speaker, rows: int) -> None:
        """Raises UserError where the grammar cannot be followed with the target's tokens."""
        self._grammar: Followed | None = None
        self._penalties: Penalties | None = None
        if sampling.grammar is not None:
            self._grammar = sampling.grammar.follow(target, rows)
        self.masks_drafts = self._grammar if sampling.grammar is not None and sampling.grammar.masks_drafts else None
        if sampling.penalized:
            self._penalties = Penalties(sampling, rows, target.vocab_size, target.device)

    def begin(self, row: int, prompt: Tensor, logits: Tensor) -> Tensor:
        """A request with these tokens, ``[T]``; ``logits [1, V]`` after them, as the first token is chosen of them."""
        if self._penalties is not None:
            self._penalties.begin(row, prompt)
            logits = self._penalties.apply(logits[:, None], first=row)[:, 0]
        if self._grammar is not None:
            self._grammar.begin(row)
            logits = self._grammar.mask(logits[:, None], first=row)[0][:, 0]
        return logits

    def apply(self, logits: Tensor, trees: DraftTrees) -> tuple[Tensor, DraftTrees]:
        """The target's logits ``[B, N + 1, V]`` as tokens are chosen of them, and the drafts as they count: without
        those that may not come. The rule judges these, too: not to try what was drawn would take it out of q."""
        if self._penalties is not None:
            logits = self._penalties.apply(logits, trees)
        if self._grammar is None:
            return logits, trees
        masked, may_come = self._grammar.mask(logits, trees)
        return masked, replace(trees, alive=trees.beneath(may_come))

    def advance(self, tokens: Tensor, counts: Tensor, first: int = 0) -> None:
        """The first ``counts [B]`` of ``tokens [B, n]`` are emitted, of the requests from row ``first`` on."""
        if self._penalties is not None:
            self._penalties.advance(tokens, counts, first)

    def read(self, row: int, tokens: Sequence[int]) -> None:
        """The host read what was emitted."""
        if self._grammar is not None:
            self._grammar.advance(row, tokens)

    def drop(self, row: int, last: int) -> None:
        """Forget a request; the last one takes its row."""
        for each in (self._grammar, self._penalties):
            if each is not None:
                each.drop(row, last)
