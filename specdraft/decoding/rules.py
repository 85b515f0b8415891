"""Verification rules: pure functions from a draft and the target's verdict to what is emitted.

N = drafted nodes, V = vocabulary. Row 0 of ``p [N + 1, V]`` is the target's distribution after the last emitted token,
row i + 1 the one after draft node i. A rule walks down the tree from the root: among the children of the node it stands
on it accepts at most one, and where it accepts none the target's own token ends the round.

*Exact* rules emit tokens distributed as plain sampling from the target (greedy: token-identical). *Lossy* rules accept
more and change the distribution.

| rule | draft | |
|---|---|---|
| ``greedy`` | any | exact |
| ``rejection_sampling`` | sampled chain: Leviathan et al. (2211.17192), Chen et al. (2302.01318) | exact |
| | sampled siblings, with or without replacement: SpecInfer's multi-round rule (2305.09781) | exact |
| | deterministic candidates: top-k trees, prompt lookup | exact |
| ``Typical`` | any: Medusa's typical acceptance (2401.10774, section 2.3.1) | **lossy** |
| ``Ears`` | any: rejection sampling with a tolerance for uncertain targets (2512.13194) | **lossy** |"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.sampling import sample
from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.errors import UserError


class Verdict(NamedTuple):
    """The accepted nodes from the root down, and the correction or bonus token that follows them."""

    path: tuple[int, ...]
    next_token: int


Rule = Callable[[DraftTree, Tensor, torch.Generator | None], Verdict]
"""A rule for temperatures above 0: ``(tree, p [N + 1, V], generator) -> Verdict``."""


def describe(rule: Rule) -> str:
    """A rule's name for results; a lossy one is called so."""
    if isinstance(rule, LossyRule):
        return f"lossy: {rule}"
    return str(getattr(getattr(rule, "func", rule), "__name__", rule)).replace("_", " ")


def greedy(tree: DraftTree, best: Tensor) -> Verdict:
    """Follow the target's own choices ``best [N + 1]`` (argmax ids) down the tree as far as they were drafted.
    Comparing token ids, never probabilities, is what makes temperature 0 identical to plain greedy decoding."""
    choices, drafted = best.tolist(), tree.tokens.tolist()
    path: list[int] = []
    here = ROOT
    while True:
        below = [child for child in tree.children.get(here, ()) if drafted[child] == choices[here + 1]]
        if not below:
            return Verdict(tuple(path), choices[here + 1])
        here = below[0]
        path.append(here)


def rejection_sampling(tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Verdict:
    """Exact sampling for sampled and deterministic drafts, chains and trees.
    At every node the residual r starts as p. Each child x in turn is accepted with probability min(1, r(x) / q(x));
    when it is rejected r becomes norm(max(r - q, 0)) with the q that x was drawn from. A deterministic candidate is
    the case q = point mass on x. If no child is left the correction (or bonus, below the last node) is drawn from r."""
    return _walk(tree, p, generator, tolerance=0.0)


class LossyRule(ABC):
    """A rule that changes the distribution of what is emitted; by how much is measured while decoding."""

    @abstractmethod
    def __call__(self, tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Verdict:
        """Verify ``tree`` against ``p [N + 1, V]``."""

    @abstractmethod
    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """How the first token after a chain's root is chosen: the probability ``[V]`` of accepting each draft, and the
        distribution ``[V]`` that replaces a rejected one. q, p: ``[V]``."""

    def divergence(self, tree: DraftTree, p: Tensor) -> float:
        """Total variation between the target's distribution and that of the round's first token, exact for a chain;
        raises ValueError for a tree with branches."""
        if not tree.is_chain:
            raise ValueError("the divergence of a lossy rule is known in closed form for chains only")
        if len(tree) == 0:
            return 0.0
        q = torch.nn.functional.one_hot(tree.tokens[0], p.shape[1]).to(p) if tree.q is None else tree.q[0]
        accepted, rest = self.first_token(q, p[0])
        emitted = q * accepted
        emitted = emitted + (1 - emitted.sum()) * rest
        return 0.5 * float((emitted - p[0]).abs().sum())


@dataclass(frozen=True)
class Ears(LossyRule):
    """**Lossy**: rejection sampling that also forgives draws which a strict rule rejects by chance.
    A child x is accepted if u - ``tolerance`` * (1 - max p) < r(x) / q(x), with u uniform (2512.13194): nothing is
    forgiven where the target is sure, much where many tokens would do."""

    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UserError(f"the EARS rule's tolerance is {self.tolerance}: expected 0 (exact) or a positive number")

    def __call__(self, tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Verdict:
        """See ``LossyRule``."""
        return _walk(tree, p, generator, self.tolerance)

    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LossyRule``."""
        ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
        accepted = (ratio + self.tolerance * (1 - p.max())).clamp(max=1.0)
        left = (p - q).clamp(min=0.0)
        return accepted, left / left.sum() if left.sum() > 0 else p


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

    def __call__(self, tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Verdict:
        """See ``LossyRule``."""
        threshold = self._threshold(p)
        parents = tree.parents.to(p.device) + 1
        typical = (p[parents, tree.tokens] > threshold[parents]).tolist()
        longest: tuple[int, ...] = ()
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node, parent in enumerate(tree.parent_list):
            if typical[node] and parent in paths:
                paths[node] = (*paths[parent], node)
                longest = max(longest, paths[node], key=len)  # the first of equals stays
        end = longest[-1] if longest else ROOT
        return Verdict(longest, int(sample(p[end + 1], generator)))

    def first_token(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LossyRule``."""
        return (p > self._threshold(p)).to(p.dtype), p

    def _threshold(self, p: Tensor) -> Tensor:
        """``[...]`` of ``p [..., V]``."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)


def _walk(tree: DraftTree, p: Tensor, generator: torch.Generator | None, tolerance: float) -> Verdict:
    # One uniform number per node, drawn at once: a draw for a node that is never reached costs nothing, and the loop
    # below asks the device only where siblings have to be tried one after the other.
    uniform = torch.rand(len(tree), generator=generator, dtype=torch.float64, device=p.device)
    parents = tree.parents.to(p.device) + 1
    drafted = tree.tokens
    p_drafted = p[parents, drafted]
    q_drafted = torch.ones_like(p_drafted) if tree.q is None else tree.q.gather(1, drafted[:, None])[:, 0]
    allowance = tolerance * (1 - p.amax(-1))[parents] if tolerance else torch.zeros_like(p_drafted)
    accepts = (uniform * q_drafted < p_drafted + allowance * q_drafted).tolist()  # right for every first child
    tokens: list[int] = drafted.tolist()
    path: list[int] = []
    here = ROOT
    while True:
        residual = p[here + 1]
        for number, child in enumerate(tree.children.get(here, ())):
            accepted = accepts[child]
            if number:  # a sibling was rejected: r is no longer p
                mass = residual[tokens[child]] + allowance[child] * q_drafted[child]
                accepted = bool(uniform[child] * q_drafted[child] < mass)
            if accepted:
                path.append(child)
                here = child
                break
            residual = _reject(residual, tokens[child], None if tree.q is None else tree.q[child])
        else:
            return Verdict(tuple(path), int(sample(residual, generator)))


def _reject(residual: Tensor, token: int, q: Tensor | None) -> Tensor:
    """norm(max(r - q, 0)); q None is the point mass on ``token``."""
    if q is None:
        left = residual.clone()
        left[token] = 0.0
    else:
        left = (residual - q).clamp_(min=0.0)
    total = left.sum()
    # r = q up to rounding: a rejection of probability about 1e-7 keeps r itself.
    return left / total if total > 0 else residual
