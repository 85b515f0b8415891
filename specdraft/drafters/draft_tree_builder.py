"""Growing drafts of any shape from a drafter that can say what follows a token.

B = requests, m = nodes of a level, D = nodes read so far, N = drafted nodes, w = children of a node, Vd / V = draft /
target vocabulary.

A drafter gives the logits after the last emitted tokens, and a function that reads a level of nodes and returns the
logits after each. Chains, static and dynamic trees, greedy and sampled drafts all come out of it the same way, for all
requests together, and without a number being read from the device; only a chain that may end early asks at every level
whether all have ended, so that what nobody drafts costs nothing."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.pacing import Goodput
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import DynamicTree, ForcedPath, Shape, StaticTree
from specdraft.decoding.stopping import JointStop, Stop
from specdraft.decoding.tree import ROOT, DraftTrees, empty

FIRST_DRAW = 2**20  # numbers of ``Chance`` before it belong to verification


class Level(NamedTuple):
    """Nodes that a drafter is to read.
    tokens: ``[B, m]`` target ids. parents: ``[B, m]`` each node's parent, as an index into the level read before (all 0
    on the first level: the last emitted token). depth: of the level, from 1. before: nodes read before. seen: bool
    ``[B, m, D]`` which of all nodes read so far, this level's at the end, each node may attend to: its ancestors and
    itself; None where that is all of them, on a chain."""

    tokens: Tensor
    parents: Tensor
    depth: int
    before: int
    seen: Tensor | None


Extend = Callable[[Level], Tensor]
"""Reads a level and returns the logits ``[B, m, Vd]`` after each of its nodes."""


class Vocabulary(NamedTuple):
    """size: of the target's vocabulary. ids: ``[Vd]`` target ids of the draft vocabulary; None if it is the whole."""

    size: int
    ids: Tensor | None = None

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft ids to target ids, of any shape."""
        return tokens if self.ids is None else self.ids[tokens]

    def scatter_to_target(self, q: Tensor) -> Tensor:
        """Probabilities ``[..., Vd]`` -> ``[..., V]``, zero outside the draft vocabulary."""
        return q if self.ids is None else q.new_zeros(*q.shape[:-1], self.size).index_copy_(-1, self.ids, q)


def grow(
    logits: Tensor,
    extend: Extend,
    shape: Shape | ForcedPath,
    sampling: Sampling,
    chance: Chance | None,
    vocabulary: Vocabulary,
) -> DraftTrees:
    """Grow drafts of this shape; ``logits [B, Vd]`` follow the last emitted tokens. Greedy drafts ask no ``chance``."""
    if isinstance(shape, ForcedPath):
        return _grow_forced(logits, extend, shape, vocabulary)
    if isinstance(shape, DynamicTree):
        return _grow_dynamic(logits, extend, shape, vocabulary)
    assert not isinstance(shape.stop, Goodput)  # it said how long before the round began
    if not shape.sampled or sampling.greedy:
        chance = None  # the likeliest tokens are drafted
    else:
        assert chance is not None
    if isinstance(shape.stop, JointStop):
        return _grow_together(shape.stop, logits, extend, shape, sampling, chance, vocabulary)
    if shape.stop is not None:
        return _grow_until(shape.stop, logits, extend, shape, sampling, chance, vocabulary)
    return _grow_static(logits, extend, shape, sampling, chance, vocabulary)


def _grow_static(
    logits: Tensor, extend: Extend, shape: StaticTree, sampling: Sampling, chance: Chance | None, vocabulary: Vocabulary
) -> DraftTrees:
    batch, device = len(logits), logits.device
    children: list[_Children] = []  # per level
    parents: list[int] = []
    read, level, before = [ROOT], [ROOT], 0  # nodes that ``logits`` tell of, nodes of the level, nodes read before it
    drawn = FIRST_DRAW
    seen = None if shape.is_chain else torch.zeros((1, 1, 0), dtype=torch.bool, device=device)
    logits = logits[:, None]  # [B, 1, Vd]
    for depth, branching in enumerate(shape.branching, start=1):
        counts = [count for count in branching if count]
        width = max(counts)
        if chance is None:
            found = _best(logits, width)
        else:
            found = _draw(sampling.probabilities(logits), width, chance, drawn)
            drawn += len(counts) * width
        wanted = tuple(place * width + rank for place, count in enumerate(counts) for rank in range(count))
        children.append(found if len(wanted) == len(counts) * width else found.take(_constant(wanted, device)))
        level = list(range(len(parents), len(parents) + len(wanted)))
        parents += [node for node, count in zip(read, counts, strict=True) for _ in range(count)]
        if depth == shape.depth:
            break
        unread = [node for node, count in zip(level, shape.branching[depth], strict=True) if count]
        above = _constant(tuple(read.index(parents[node]) for node in unread), device)
        tokens = vocabulary.to_target(children[-1].tokens)
        if unread != level:
            tokens = tokens[:, _constant(tuple(node - level[0] for node in unread), device)]
        if seen is not None:
            seen = _seen_by(above[None], seen)
        wider = None if seen is None else seen.expand(batch, -1, -1)
        logits = extend(Level(tokens, above.expand(batch, -1), depth, before, wider))
        read, before = unread, before + len(unread)
    found, above = _whole(children, vocabulary), _constant(tuple(parents), device).expand(batch, -1)
    return DraftTrees(found.tokens, above, found.q, found.alive, depth=shape.depth, width=shape.width)


def _grow_until(
    stop: Stop,
    logits: Tensor,
    extend: Extend,
    shape: StaticTree,
    sampling: Sampling,
    chance: Chance | None,
    vocabulary: Vocabulary,
) -> DraftTrees:
    children: list[_Children] = []  # per level
    above = torch.zeros((len(logits), 1), dtype=torch.int64, device=logits.device)
    kept = torch.ones(len(logits), device=logits.device)  # the probability of what each draft holds
    going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for depth in range(1, shape.depth + 1):
        q = _distributions(logits, sampling, chance)
        going = going & ~stop(q, kept)
        if not bool(going.any()):
            break
        found = _next(logits, q, depth, chance)
        children.append(found._replace(alive=going[:, None]))
        kept = kept * q.gather(1, found.tokens)[:, 0]
        if depth < shape.depth:
            logits = extend(Level(vocabulary.to_target(found.tokens), above, depth, depth - 1, None))[:, 0]
    if not children:
        return empty(len(going), going.device)
    return DraftTrees.chains(*_whole(children, vocabulary))


def _grow_together(
    stop: JointStop,
    logits: Tensor,
    extend: Extend,
    shape: StaticTree,
    sampling: Sampling,
    chance: Chance | None,
    vocabulary: Vocabulary,
) -> DraftTrees:
    above = torch.zeros((len(logits), 1), dtype=torch.int64, device=logits.device)
    q = _distributions(logits, sampling, chance)
    children = [_next(logits, q, 1, chance)]  # per level
    while (depth := len(children)) < shape.depth and not stop.ends(q.amax(-1)):
        logits = extend(Level(vocabulary.to_target(children[-1].tokens), above, depth, depth - 1, None))[:, 0]
        q = _distributions(logits, sampling, chance)
        children.append(_next(logits, q, depth + 1, chance))
    return DraftTrees.chains(*_whole(children, vocabulary))


def _distributions(logits: Tensor, sampling: Sampling, chance: Chance | None) -> Tensor:
    """What the next tokens are drawn from, or are the likeliest of; ``[B, Vd]`` both."""
    return logits.float().softmax(-1) if chance is None else sampling.probabilities(logits)


def _next(logits: Tensor, q: Tensor, depth: int, chance: Chance | None) -> "_Children":
    """A token for each of the chains, of the distributions ``q [B, Vd]``."""
    return _best(logits[:, None], 1) if chance is None else _draw(q[:, None], 1, chance, FIRST_DRAW + depth - 1)


def _whole(children: "list[_Children]", vocabulary: Vocabulary) -> "_Children":
    """Those of all levels, in the target's vocabulary."""
    found = _Children.cat(children)
    q = None if found.q is None else vocabulary.scatter_to_target(found.q)
    return _Children(vocabulary.to_target(found.tokens), q, found.alive)


class _Children(NamedTuple):
    """Draft ids ``[B, m]``, the q ``[B, m, Vd]`` of each draw, and which of them there are, ``[B, m]``; None: all."""

    tokens: Tensor
    q: Tensor | None = None
    alive: Tensor | None = None

    def take(self, places: Tensor) -> "_Children":
        q, alive = (None if part is None else part[:, places] for part in self[1:])
        return _Children(self.tokens[:, places], q, alive)

    @classmethod
    def cat(cls, parts: "list[_Children]") -> "_Children":
        alive = None
        if any(part.alive is not None for part in parts):
            every = (torch.ones_like(p.tokens, dtype=torch.bool) if p.alive is None else p.alive for p in parts)
            alive = torch.cat(list(every), dim=1)
        drawn = [part.q for part in parts if part.q is not None]
        return cls(torch.cat([part.tokens for part in parts], dim=1), torch.cat(drawn, dim=1) if drawn else None, alive)


def _best(logits: Tensor, width: int) -> _Children:
    """The ``width`` most likely children of each node of ``logits [B, r, Vd]``, as far as there are so many."""
    if width == 1:
        return _Children(logits.argmax(-1))
    there = min(width, logits.shape[-1])
    best = logits.topk(there).indices  # [B, r, there]
    if there == width:
        return _Children(best.flatten(1))
    best = torch.nn.functional.pad(best, (0, width - there))
    alive = (torch.arange(width, device=logits.device) < there).expand_as(best)
    return _Children(best.flatten(1), None, alive.flatten(1))


def _draw(p: Tensor, width: int, chance: Chance, first: int) -> _Children:
    """Draw ``width`` tokens from each of ``p [B, r, Vd]``, one after the other without replacement. Of a distribution
    with few tokens (top-k, top-p) there may be fewer; how many depends on the distribution alone, never on what was
    drawn, so that the draft stays lossless."""
    uniform = chance.uniform(first, p.shape[1] * width).unflatten(1, (p.shape[1], width))
    if width == 1:
        return _Children(sample(p, uniform[..., 0]), p)
    tokens: list[Tensor] = []
    q, alive = [], []
    count = (p > 0).sum(-1)  # [B, r]
    for rank in range(width):
        if rank:
            left = p.scatter(-1, tokens[-1][..., None], 0.0)
            total = left.sum(-1, keepdim=True)
            p = torch.where(total > 0, left / total, p)
        tokens.append(sample(p, uniform[..., rank]))
        q.append(p)
        alive.append(rank < count)
    return _Children(*(torch.stack(part, dim=2).flatten(1, 2) for part in (tokens, q, alive)))


def _grow_dynamic(logits: Tensor, extend: Extend, shape: DynamicTree, vocabulary: Vocabulary) -> DraftTrees:
    batch, device = len(logits), logits.device
    width = min(shape.top_k, logits.shape[-1])
    best = logits[:, None].float().log_softmax(-1).topk(width)  # [B, 1, w]
    tokens = vocabulary.to_target(best.indices).flatten(1)  # [B, w]; of all nodes from here on
    joint = best.values.flatten(1)  # log probability of the path that ends in a node
    parents = torch.full_like(tokens, ROOT)
    unread = torch.arange(width, device=device).expand(batch, -1)  # nodes to read next
    above = torch.zeros_like(unread)
    seen = torch.zeros((batch, 1, 0), dtype=torch.bool, device=device)
    for depth in range(1, shape.depth):
        seen = _seen_by(above, seen)
        logits = extend(Level(tokens.gather(1, unread), above, depth, width * (depth - 1), seen))
        best = logits.float().log_softmax(-1).topk(width)  # [B, m, w]
        below = (best.values + joint.gather(1, unread)[..., None]).flatten(1)
        chosen = below.topk(width).indices  # [B, w]
        parents = torch.cat([parents, unread.repeat_interleave(width, dim=1)], dim=1)
        above, unread = chosen // width, tokens.shape[1] + chosen
        tokens = torch.cat([tokens, vocabulary.to_target(best.indices).flatten(1)], dim=1)
        joint = torch.cat([joint, below], dim=1)
    # No node is more probable than its parent, which comes before it, so a stable order keeps the tree connected.
    kept = joint.sort(descending=True, stable=True, dim=1).indices[:, : shape.num_nodes].sort(dim=1).values
    places = torch.arange(kept.shape[1], device=device).expand_as(kept)
    renumbered = torch.full((batch, tokens.shape[1] + 1), ROOT, device=device).scatter_(1, kept, places)
    parents = parents.gather(1, kept) % (tokens.shape[1] + 1)  # the last place is the root's
    return DraftTrees(tokens.gather(1, kept), renumbered.gather(1, parents), depth=shape.depth, width=width)


def _grow_forced(logits: Tensor, extend: Extend, shape: ForcedPath, vocabulary: Vocabulary) -> DraftTrees:
    batch, top = len(logits), min(shape.top_k, logits.shape[-1])
    above = torch.zeros((batch, 1), dtype=torch.int64, device=logits.device)
    logits, tokens = logits[:, None], []
    for depth in range(1, shape.depth + 1):
        tokens.append(vocabulary.to_target(logits[:, 0].topk(top).indices))  # [B, top]
        if depth < shape.depth:
            logits = extend(Level(shape.tokens[:, depth - 1 : depth], above, depth, depth - 1, None))
    # A level hangs on the first node of the level above, in the place of the token that is forced there.
    first = [ROOT, *range(0, (shape.depth - 1) * top, top)][: shape.depth]
    parents = _constant(tuple(node for node in first for _ in range(top)), logits.device)
    return DraftTrees(torch.cat(tokens, dim=1), parents.expand(batch, -1), depth=shape.depth, width=top)


def _seen_by(parents: Tensor, above: Tensor) -> Tensor:
    """``Level.seen`` of nodes whose parents are at ``[B, m]`` in the level before, which itself saw ``above``."""
    before = above.gather(1, parents[..., None].expand(-1, -1, above.shape[2]))
    own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    return torch.cat([before, own], dim=2)


@lru_cache(maxsize=256)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``[len(values)]``, copied to the device once and not in every round."""
    return torch.tensor(values, dtype=torch.int64, device=device)
