"""Verification rules: pure functions from drafts and the target's verdict to what is emitted.

B = requests, N = drafted nodes, V = vocabulary. Row 0 of ``p [B, N + 1, V]`` is the target's distribution after the
last emitted token, row i + 1 the one after draft node i. A rule walks down each tree from the root: among the children
of the node it stands on it accepts at most one, and where it accepts none the target's own token ends the round.
All of it is tensor operations: no rule reads a number back from the device.

*Exact* rules emit tokens distributed as plain sampling from the target (greedy: token-identical). *Lossy* rules accept
more and change the distribution.

| rule | draft | |
|---|---|---|
| ``greedy`` | any | exact |
| ``rejection_sampling`` | sampled chain: Leviathan et al. (2211.17192), Chen et al. (2302.01318) | exact |
| | sampled siblings, with or without replacement: SpecInfer's multi-round rule (2305.09781) | exact |
| | deterministic candidates: top-k trees, prompt lookup | exact |
| ``block_verification`` | sampled chain: accepted as a whole (2403.10444), in a module of its own | exact |
| ``Typical`` | any: Medusa's typical acceptance (2401.10774, section 2.3.1) | **lossy** |
| ``Ears`` | any: rejection sampling with a tolerance for uncertain targets (2512.13194) | **lossy** |"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.sampling import sample
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.errors import UserError


class Verdict(NamedTuple):
    """path: ``[B, depth]``, of which the first ``accepted [B]`` are the accepted nodes from the root down. next_token:
    ``[B]``, the correction or bonus token that follows them."""

    path: Tensor
    accepted: Tensor
    next_token: Tensor


Rule = Callable[[DraftTrees, Tensor, Tensor], Verdict]
"""A rule for temperatures above 0: ``(trees, p [B, N + 1, V], uniform [B, N + 1]) -> Verdict``; the uniform numbers in
[0, 1) are all the chance that it needs. The first is for the token after the path, the others are for the nodes, so
that a node which is never reached costs no draw, and a draft that is cut changes none."""


def describe(rule: Rule) -> str:
    """A rule's name for results; a lossy one is called so."""
    if isinstance(rule, LossyRule):
        return f"lossy: {rule}"
    return str(getattr(getattr(rule, "func", rule), "__name__", rule)).replace("_", " ")


def greedy(trees: DraftTrees, best: Tensor) -> Verdict:
    """Follow the target's own choices ``best [B, N + 1]`` (argmax ids) down the tree as far as they were drafted.
    Comparing token ids, never probabilities, is what makes temperature 0 identical to plain greedy decoding."""
    right = trees.tokens == best.gather(1, trees.parents + 1)
    if trees.width > 1:  # of equal siblings the first
        same = (trees.parents[..., None] == trees.parents[:, None]) & (trees.tokens[..., None] == trees.tokens[:, None])
        right &= ~same.tril(-1).any(-1)
    return verdict(trees, trees.beneath(right), lambda end: best.gather(1, end[:, None])[:, 0])


def rejection_sampling(trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
    """Exact sampling for sampled and deterministic drafts, chains and trees.
    At every node the residual r starts as p. Each child x in turn is accepted with probability min(1, r(x) / q(x));
    when it is rejected r becomes norm(max(r - q, 0)) with the q that x was drawn from. A deterministic candidate is
    the case q = point mass on x. If no child is left the correction (or bonus, below the last node) is drawn from r."""
    if trees.q is None:
        # Candidates that are tried one after the other, each with what p leaves it, are accepted as often as a token
        # that is drawn from p is one of them; and where none is, that token is the correction.
        return greedy(trees, sample(p, uniform))
    return _walk(trees, p, uniform, tolerance=0.0)


class LossyRule(ABC):
    """A rule that changes the distribution of what is emitted; by how much is measured while decoding."""

    @abstractmethod
    def __call__(self, trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
        """Verify ``trees`` against ``p [B, N + 1, V]``."""

    @abstractmethod
    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """How the first token after a chain's root is chosen: the probability ``[B, V]`` of accepting each draft, and
        the distribution ``[B, V]`` that replaces a rejected one. q, p: ``[B, V]``."""

    def divergence(self, trees: DraftTrees, p: Tensor) -> Tensor:
        """Total variation ``[B]`` between the target's distribution and that of the round's first token, exact for
        chains; raises ValueError for trees with branches."""
        if not trees.is_chain:
            raise ValueError("the divergence of a lossy rule is known in closed form for chains only")
        p = p[:, 0]
        if not trees.num_nodes:
            return torch.zeros_like(p[:, 0])
        q = torch.nn.functional.one_hot(trees.tokens[:, 0], p.shape[-1]).to(p) if trees.q is None else trees.q[:, 0]
        accepted, rest = self.first_token(q, p)
        emitted = q * accepted
        emitted = emitted + (1 - emitted.sum(-1, keepdim=True)) * rest
        found = 0.5 * (emitted - p).abs().sum(-1)
        return found if trees.alive is None else found.where(trees.alive[:, 0], 0.0)


@dataclass(frozen=True)
class Ears(LossyRule):
    """**Lossy**: rejection sampling that also forgives draws which a strict rule rejects by chance.
    A child x is accepted if u - ``tolerance`` * (1 - max p) < r(x) / q(x), with u uniform (2512.13194): nothing is
    forgiven where the target is sure, much where many tokens would do."""

    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UserError(f"the EARS rule's tolerance is {self.tolerance}: expected 0 (exact) or a positive number")

    def __call__(self, trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
        """See ``LossyRule``."""
        return _walk(trees, p, uniform, self.tolerance)

    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LossyRule``."""
        ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
        accepted = (ratio + self.tolerance * (1 - p.amax(-1, keepdim=True))).clamp(max=1.0)
        return accepted, _rest(p, q)


@dataclass(frozen=True)
class Typical(LossyRule):
    """**Lossy**: accept whatever the target finds typical, however it was drafted.
    A node x is accepted if p(x) > min(``epsilon``, ``delta`` * exp(-H(p))) with the entropy H in nats. The longest
    accepted path wins, among equals the one whose siblings come first; the token after it is sampled from p."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon <= 1 and 0 <= self.delta <= 1):
            given = f"epsilon {self.epsilon} and delta {self.delta}"
            raise UserError(f"typical acceptance has {given}: expected both within 0 to 1")

    def __call__(self, trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
        """See ``LossyRule``."""
        above = trees.parents + 1
        accepted = trees.beneath(_of_drafted(trees, p) > self._threshold(p).gather(1, above))
        if trees.num_nodes:
            lengths = trees.depths * accepted
            longest = lengths.argmax(-1)  # the first of equals
            end = trees.ancestors[_rows(longest), longest]
            accepted = accepted & end
        return verdict(trees, accepted, lambda end: sample(p[_rows(end), end], uniform[:, 0]))

    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LossyRule``."""
        return (p > self._threshold(p)[..., None]).to(p.dtype), p

    def _threshold(self, p: Tensor) -> Tensor:
        """``[...]`` of ``p [..., V]``."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)


def _walk(trees: DraftTrees, p: Tensor, uniform: Tensor, tolerance: float) -> Verdict:
    """The rule of ``rejection_sampling``, which forgives as ``Ears`` does."""
    p_drafted = _of_drafted(trees, p)
    q_drafted = torch.ones_like(p_drafted)
    if trees.q is not None:
        q_drafted = trees.q.gather(2, trees.tokens[..., None])[..., 0]
    allowance = tolerance * (1 - p.amax(-1)).gather(1, trees.parents + 1) * q_drafted
    threshold = uniform[:, 1:] * q_drafted
    if trees.width == 1:
        accepted = trees.beneath(threshold < p_drafted + allowance)
        return verdict(trees, accepted, lambda end: sample(_residual(trees, p, end), uniform[:, 0]))
    accepted = torch.zeros_like(threshold, dtype=torch.bool)
    here = torch.full_like(trees.tokens[:, 0], ROOT)  # [B], the node that each request stands on
    for _ in range(trees.depth):
        residual, taken = p[_rows(here), here + 1], here  # [B, V], [B]
        for rank in range(trees.width):
            child, exists = _child(trees, here, rank)
            exists = exists & (taken == here)
            mass = residual.gather(1, trees.tokens.gather(1, child)) + allowance.gather(1, child)
            ok = exists & (threshold.gather(1, child) < mass)[:, 0]
            accepted = accepted.scatter(1, child, accepted.gather(1, child) | ok[:, None])
            taken = torch.where(ok, child[:, 0], taken)
            residual = torch.where((exists & ~ok)[:, None], _reject(trees, residual, child), residual)
        here = taken
    return verdict(trees, accepted, lambda end: sample(_residual(trees, p, end), uniform[:, 0]))


def verdict(trees: DraftTrees, accepted: Tensor, after: Callable[[Tensor], Tensor]) -> Verdict:
    """Of the ``accepted`` nodes ``[B, N]``, a path in each tree; ``after`` gives the token that follows from the row of
    p ``[B]`` where the path ends."""
    count = accepted.sum(-1)
    if not trees.num_nodes:
        return Verdict(trees.tokens, count, after(count))
    index = torch.arange(trees.num_nodes, device=accepted.device)
    path = torch.where(accepted, index, trees.num_nodes - 1).sort(-1).values[:, : trees.depth]
    end = torch.where(accepted, index + 1, 0).amax(-1)  # parents come before children
    return Verdict(path, count, after(end))


def _rows(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device)


def _of_drafted(trees: DraftTrees, p: Tensor) -> Tensor:
    """What p gives to every drafted token, ``[B, N]``."""
    return p[_rows(p)[:, None], trees.parents + 1, trees.tokens]


def _child(trees: DraftTrees, nodes: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The child of that rank of ``nodes [B]``: its index ``[B, 1]``, and whether there is one ``[B]``."""
    found = (trees.parents == nodes[:, None]) & (trees.ranks == rank)
    if trees.alive is not None:
        found = found & trees.alive
    return found.int().argmax(-1, keepdim=True), found.any(-1)


def _residual(trees: DraftTrees, p: Tensor, end: Tensor) -> Tensor:
    """What is left of p in its rows ``end [B]`` when all children have been rejected, ``[B, V]``."""
    residual = p[_rows(end), end]
    for rank in range(trees.width if trees.num_nodes else 0):
        child, exists = _child(trees, end - 1, rank)
        residual = torch.where(exists[:, None], _reject(trees, residual, child), residual)
    return residual


def _reject(trees: DraftTrees, residual: Tensor, child: Tensor) -> Tensor:
    """norm(max(r - q, 0)) of each request, with the q of ``child [B, 1]``; chosen tokens are point masses."""
    if trees.q is None:
        left = residual.scatter(1, trees.tokens.gather(1, child), 0.0)
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, residual)
    return _rest(residual, trees.q[_rows(child), child[:, 0]])


def _rest(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) of ``[B, V]``. Equality up to rounding, a rejection of probability about 1e-7, keeps p."""
    left = (p - q).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)
