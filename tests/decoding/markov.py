"""A target and a draft in which the last token alone tells what follows: every joint distribution is a product."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.draft_tree_builder import FIRST_DRAW, Vocabulary, grow
from tests.chance import goodness_of_fit, plain_probabilities
from tests.decoding.trees import chance

V, EMITTED = 6, 3

Draft = Callable[[Chance], DraftTrees]


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

    def after(self, trees: DraftTrees) -> Tensor:
        """The target's ``p [B, N + 1, V]`` after the root and after every node."""
        return self.p[torch.nn.functional.pad(1 + trees.tokens, (1, 0))]

    def grown(self, shape: Shape) -> Draft:
        """Drafts of this shape, grown as every drafter grows them."""
        drafted = self.logits[1]

        def draft(chance: Chance) -> DraftTrees:
            first = drafted[:1].expand(len(chance.seeds), V)
            return grow(first, lambda level: drafted[1 + level.tokens], shape, self.sampling, chance, Vocabulary(V))

        return draft

    def with_replacement(self, widths: tuple[int, ...]) -> Draft:
        """Drafts whose nodes at level i all have ``widths[i]`` children, each drawn from the same q."""

        def draft(chance: Chance) -> DraftTrees:
            tokens, q, parents, level = [], [], [], [ROOT]
            for width in widths:
                below: list[int] = []
                for node in level:
                    below += range(len(parents), len(parents) + width)
                    above = torch.zeros_like(chance.seeds) if node == ROOT else 1 + tokens[node]
                    for number in range(FIRST_DRAW + len(parents), FIRST_DRAW + len(parents) + width):
                        q.append(self.q[above])
                        tokens.append(sample(q[-1], chance.uniform(number, 1)[:, 0]))
                    parents += [node] * width
                level = below
            found = torch.stack(tokens, dim=1)
            above = torch.tensor(parents).expand_as(found)
            return DraftTrees(found, above, torch.stack(q, dim=1), depth=len(widths), width=max(widths))

        return draft

    def emit(self, rule: rules.Rule, draft: Draft, draws: int, seed: int = 2) -> tuple[Tensor, Tensor]:
        """The first ``EMITTED`` tokens ``[draws, EMITTED]``, and how many drafted ones were accepted ``[draws]``.

        They are emitted as the decode loop emits them: what the rule gives, then plain sampling.
        """
        numbers = chance(draws, seed)
        trees = draft(numbers)
        path, accepted, token = rule(trees, self.after(trees), numbers.uniform(0, trees.num_nodes + 1))
        texts = torch.nn.functional.pad(trees.tokens.gather(1, path), (0, EMITTED))
        texts = texts.scatter(1, accepted[:, None], token[:, None])[:, :EMITTED]
        for place in range(1, EMITTED):
            plain = sample(self.p[1 + texts[:, place - 1]], numbers.uniform(2 * FIRST_DRAW + place, 1)[:, 0])
            texts[:, place] = torch.where(accepted < place, plain, texts[:, place])
        return texts, accepted

    def fits(self, texts: Tensor) -> list[float]:
        """p-values that the first token, the first two and all of them are the target's."""
        values = []
        for count in range(1, EMITTED + 1):
            flat = texts[:, :count] @ (V ** torch.arange(count).flip(0))
            values.append(goodness_of_fit(flat, self.exact.reshape(V**count, -1).sum(1)))
        return values
