"""Penalties for what a text already says, as serving engines apply them: a request may ask for them, and the generation
settings that a model is published with may, too.

B = requests, N = nodes of a draft, n = tokens emitted in a round, V = vocabulary.

The target's distribution after a node depends on the tokens above it, so that every node of a draft is judged by its
own path: what is emitted is what plain decoding with the penalties emits. Drafts are made without them, as engines make
them. Everything is counted on the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdraft.decoding.tree import DraftTrees

if TYPE_CHECKING:
    from specdraft.decoding.sampling import Sampling


class Penalties:
    """What requests that are decoded side by side have said, each in its row. It takes 5 bytes for each of V tokens."""

    def __init__(self, sampling: "Sampling", rows: int, vocab_size: int, device: torch.device) -> None:
        """``sampling`` says how strong they are."""
        self._repetition, self._presence = sampling.repetition_penalty, sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._prompt = torch.zeros((rows, vocab_size), dtype=torch.bool, device=device)
        self._answer = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)

    def begin(self, row: int, prompt: Tensor) -> None:
        """A request with these tokens, ``[T]``, whose answer has none yet."""
        self._prompt[row] = False
        self._prompt[row, prompt] = True
        self._answer[row] = 0

    def advance(self, tokens: Tensor, counts: Tensor, first: int = 0) -> None:
        """The first ``counts [B]`` of ``tokens [B, n]`` were emitted, of the requests from row ``first`` on."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self._answer[first : first + len(tokens)].scatter_add_(1, tokens, emitted.int())

    def drop(self, row: int, last: int) -> None:
        """Forget a request; the last one takes its row."""
        for rows in (self._prompt, self._answer):
            rows[row] = rows[last]

    def apply(self, logits: Tensor, trees: DraftTrees | None = None, first: int = 0) -> Tensor:
        """The target's logits ``[B, N + 1, V]`` after the last emitted token and after every node of ``trees`` (None:
        there are no nodes), of the requests from row ``first`` on, as fp32 with the penalties."""
        end, logits = first + len(logits), logits.float()
        prompt, answer = self._prompt[first:end, None], self._answer[first:end, None]
        found = self._penalized(logits, prompt, answer)
        if trees is None or not trees.num_nodes:
            return found
        # A path changes the counts of its own tokens alone. Those of other nodes are counted under a node as well, so
        # that all entries which are written to one place are equal.
        same = trees.tokens[:, :, None] == trees.tokens[:, None]
        more = (pad(trees.ancestors, (0, 0, 1, 0)).float() @ same.float()).int()  # [B, N + 1, N]
        place = trees.tokens[:, None].expand_as(more)
        prompt, answer = (part.expand_as(logits).gather(-1, place) for part in (prompt, answer))
        return found.scatter(-1, place, self._penalized(logits.gather(-1, place), prompt, answer + more))

    def _penalized(self, logits: Tensor, prompt: Tensor, answer: Tensor) -> Tensor:
        """prompt: whether it has the token. answer: how often that has it."""
        if self._repetition != 1:
            weaker = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = torch.where(prompt | (answer > 0), weaker, logits)
        return logits - self._frequency * answer - self._presence * (answer > 0)


def penalized(logits: Tensor, sampling: "Sampling", prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The target's logits ``[V]`` after a prompt and what was answered so far, as a token is chosen of them."""
    if not sampling.penalized:
        return logits
    prompt_ids, said = (torch.tensor(ids, dtype=torch.int64, device=logits.device) for ids in (prompt, answer))
    penalties = Penalties(sampling, 1, len(logits), logits.device)
    penalties.begin(0, prompt_ids)
    penalties.advance(said[None], torch.full((1,), len(answer), device=logits.device))
    return penalties.apply(logits[None, None])[0, 0]
