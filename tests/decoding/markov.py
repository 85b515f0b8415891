"""A target and a draft in which the last token alone tells what follows: every joint distribution is a product."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.drafters.draft_tree_builder import Vocabulary, grow
from tests.chance import goodness_of_fit, plain_probabilities

V, EMITTED = 6, 3

Draft = Callable[[torch.Generator], DraftTree]


@dataclass(frozen=True)
class Markov:
    """kind: how the draft differs from the target ("near", "far", "missing" half the tokens)."""

    kind: str
    sampling: Sampling

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Of target and draft, ``[1 + V, V]``: row 0 begins, row 1 + x follows x."""
        g = torch.Generator().manual_seed(1)
        target, noise = torch.randn(2, 1 + V, V, generator=g)
        drafted = target + 0.3 * noise if self.kind == "near" else 2 * noise
        if self.kind == "missing":  # a draft vocabulary of half the tokens
            drafted[:, ::2] = -torch.inf
        return target, drafted

    @cached_property
    def p(self) -> Tensor:
        return self.sampling.probabilities(self.logits[0])

    @cached_property
    def q(self) -> Tensor:
        return self.sampling.probabilities(self.logits[1])

    @cached_property
    def exact(self) -> Tensor:
        """``[V] * EMITTED``, the joint distribution of what the target emits, by plain formulas."""
        rows = torch.stack([plain_probabilities(row, self.sampling) for row in self.logits[0]])
        joint = rows[0]
        for _ in range(EMITTED - 1):
            joint = joint[..., None] * rows[1:]
        return joint

    def grown(self, shape: Shape) -> Draft:
        """Drafts of this shape, grown as every drafter grows them."""
        drafted = self.logits[1]

        def draft(g: torch.Generator) -> DraftTree:
            return grow(drafted[:1], lambda level: drafted[1 + level.tokens], shape, self.sampling, g, Vocabulary(V))

        return draft

    def with_replacement(self, widths: tuple[int, ...]) -> Draft:
        """Drafts whose nodes at level i all have ``widths[i]`` children, each drawn from the same q."""

        def draft(g: torch.Generator) -> DraftTree:
            tokens, parents, level = [], [], [ROOT]
            for width in widths:
                below = []
                for node in level:
                    row = 0 if node == ROOT else 1 + tokens[node]
                    below += range(len(tokens), len(tokens) + width)
                    tokens += torch.multinomial(self.q[row], width, replacement=True, generator=g).tolist()
                    parents += [node] * width
                level = below
            above = torch.tensor([0 if parent == ROOT else 1 + tokens[parent] for parent in parents])
            return DraftTree(torch.tensor(tokens), torch.tensor(parents), self.q[above])

        return draft

    def emit(self, rule: rules.Rule, draft: Draft, draws: int, seed: int = 2) -> tuple[Tensor, Tensor]:
        """The first ``EMITTED`` tokens ``[draws, EMITTED]``, and how many drafted ones were accepted ``[draws]``.

        They are emitted as the decode loop emits them: what the rule gives, then plain sampling.
        """
        g = torch.Generator().manual_seed(seed)
        texts = torch.zeros((draws, EMITTED), dtype=torch.int64)
        accepted = torch.zeros(draws, dtype=torch.int64)
        for number in range(draws):
            tree = draft(g)
            path, token = rule(tree, self.p[torch.cat([tree.tokens.new_zeros(1), 1 + tree.tokens])], g)
            text = torch.tensor([*tree.tokens[list(path)].tolist(), token])[:EMITTED]
            texts[number, : len(text)] = text
            accepted[number] = len(path)
        for place in range(1, EMITTED):
            missing = accepted < place
            texts[missing, place] = sample(self.p[1 + texts[missing, place - 1]], g)
        return texts, accepted

    def fits(self, texts: Tensor) -> list[float]:
        """p-values that the first token, the first two and all of them are the target's."""
        values = []
        for count in range(1, EMITTED + 1):
            flat = texts[:, :count] @ (V ** torch.arange(count).flip(0))
            values.append(goodness_of_fit(flat, self.exact.reshape(V**count, -1).sum(1)))
        return values
