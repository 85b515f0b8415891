"""Growing a draft of any shape from a drafter that can say what follows a token.

m = nodes of a level, D = nodes read so far, N = drafted nodes, Vd / V = draft / target vocabulary.

A drafter gives the logits after the last emitted token, and a function that reads a level of nodes and returns the
logits after each. Chains, static and dynamic trees, greedy and sampled drafts all come out of it the same way.

A growing draft is a generator that yields the level to be read next and is sent its logits, so that the drafts of
several requests can grow in step and be read in one pass."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.sampling import Generators, Sampling, sample
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.decoding.tree import ROOT, DraftTree


class Level(NamedTuple):
    """Nodes that a drafter is to read.
    tokens: ``[m]`` target ids. parents: ``[m]`` each node's parent, as an index into the level read before (all 0
    on the first level: the last emitted token). depth: of the level, from 1. seen: bool ``[m, D]`` which of all nodes
    read so far, this level's at the end, each node may attend to: its ancestors and itself; None on a chain."""

    tokens: Tensor
    parents: Tensor
    depth: int
    seen: Tensor | None


Expand = Callable[[Level], Tensor]
"""Reads a level and returns the logits ``[m, Vd]`` after each of its nodes."""

ExpandBatch = Callable[[Mapping[int, Level]], Sequence[Tensor]]
"""Reads a level of each of several drafts, by the draft's number, and returns the logits after the nodes of each."""

Growth = Generator[Level, Tensor, DraftTree]


class Vocabulary(NamedTuple):
    """size: of the target's vocabulary. ids: ``[Vd]`` target ids of the draft vocabulary; None if it is the whole."""

    size: int
    ids: Tensor | None = None

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft ids to target ids, of any shape."""
        return tokens if self.ids is None else self.ids[tokens]

    def scatter_to_target(self, q: Tensor) -> Tensor:
        """Probabilities ``[N, Vd]`` -> ``[N, V]``, zero outside the draft vocabulary."""
        return q if self.ids is None else q.new_zeros(len(q), self.size).index_copy_(1, self.ids, q)


def grow(
    logits: Tensor,
    expand: Expand,
    shape: Shape,
    sampling: Sampling,
    generator: torch.Generator | None,
    vocabulary: Vocabulary,
) -> DraftTree:
    """Grow a draft of this shape; ``logits [1, Vd]`` are those after the last emitted token."""
    return grow_batch(logits, lambda levels: [expand(levels[0])], [shape], sampling, [generator], vocabulary)[0]


def grow_batch(
    logits: Tensor,
    expand: ExpandBatch,
    shapes: Sequence[Shape],
    sampling: Sampling,
    generators: Generators,
    vocabulary: Vocabulary,
) -> list[DraftTree]:
    """Grow a draft for each of B requests, level by level together, from ``logits [B, Vd]``. A draft that is complete
    is no longer among those that ``expand`` is asked to read."""
    growing = [
        _grow_dynamic(first, shape, vocabulary)
        if isinstance(shape, DynamicTree)
        else _grow_static(first, shape, sampling, generator, vocabulary)
        for first, shape, generator in zip(logits.split(1), shapes, generators, strict=True)
    ]
    drafts: dict[int, DraftTree] = {}
    levels: dict[int, Level] = {}

    def resume(number: int, logits: Tensor | None) -> None:
        try:
            # A generator that has not begun takes nothing but None.
            levels[number] = next(growing[number]) if logits is None else growing[number].send(logits)
        except StopIteration as finished:
            drafts[number] = finished.value

    for number in range(len(growing)):
        resume(number, None)
    while levels:
        read, levels = levels, {}
        for number, after in zip(read, expand(read), strict=True):
            resume(number, after)
    return [drafts[number] for number in range(len(growing))]


def _grow_static(
    logits: Tensor, shape: StaticTree, sampling: Sampling, generator: torch.Generator | None, vocabulary: Vocabulary
) -> Growth:
    seen = None if shape.is_chain else torch.zeros((1, 0), dtype=torch.bool, device=logits.device)
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    parents: list[int] = []
    level: list[int | None] = [ROOT]  # the shape's nodes one level up, as drafted
    read: list[int] = [ROOT]  # those of them that ``logits`` tell of
    for depth, branching in enumerate(shape.branching, start=1):
        wanted = [count for node, count in zip(level, branching, strict=True) if count and node is not None]
        children = _children(logits, wanted, shape.sampled, sampling, generator)
        below: list[int | None] = []
        for node, count in zip(level, branching, strict=True):
            drafted = 0
            if count and node is not None:
                chosen, drawn_from = next(children)
                drafted = len(chosen)
                below += range(len(parents), len(parents) + drafted)
                parents += [node] * drafted
                tokens.append(vocabulary.to_target(chosen))
                q += [] if drawn_from is None else [drawn_from]
            below += [None] * (count - drafted)
        if depth == shape.depth:
            break
        places = {node: place for place, node in enumerate(read)}
        level = below
        read = [node for node, count in zip(level, shape.branching[depth], strict=True) if count and node is not None]
        if not read:
            break
        above = torch.tensor([places[parents[node]] for node in read], device=logits.device)
        unread = tokens[-1] if shape.is_chain else torch.cat(tokens)[torch.tensor(read, device=logits.device)]
        seen = None if seen is None else _seen_by(above, seen)
        logits = yield Level(unread, above, depth, seen)
    sampled_from = vocabulary.scatter_to_target(torch.cat(q)) if q else None
    return DraftTree(torch.cat(tokens), torch.tensor(parents), sampled_from)


def _children(
    logits: Tensor, counts: list[int], sampled: bool, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Of each node of ``logits [m, Vd]`` its ``counts`` children: draft ids ``[c]`` and the q ``[c, Vd]`` of each draw.
    Of a distribution with few tokens (top-k, top-p) they may be fewer; how many depends on the distribution alone,
    never on what was drawn, so that the draft stays lossless."""
    if sampled and not sampling.greedy:
        for p, count in zip(sampling.probabilities(logits), counts, strict=True):
            yield _draw(p, count, generator)
        return
    most = min(max(counts), logits.shape[-1])
    ranked = logits.argmax(-1, keepdim=True) if most == 1 else logits.topk(most).indices
    for best, count in zip(ranked, counts, strict=True):
        yield best[:count], None


def _draw(p: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` tokens from ``p [Vd]``, one after the other without replacement."""
    if count == 1:
        return sample(p, generator)[None], p[None]
    # An exponential race finishes in the order of successive draws without replacement.
    times = torch.empty_like(p).exponential_(generator=generator) / p
    count = min(count, int((p > 0).sum()))
    chosen = times.topk(count, largest=False).indices
    q = p.repeat(count, 1)  # [c, Vd]
    for place in range(1, count):
        q[place:, chosen[place - 1]] = 0.0
    return chosen, q / q.sum(-1, keepdim=True)


def _grow_dynamic(logits: Tensor, shape: DynamicTree, vocabulary: Vocabulary) -> Growth:
    width = min(shape.top_k, logits.shape[-1])
    seen = torch.zeros((1, 0), dtype=torch.bool, device=logits.device)
    best = logits.float().log_softmax(-1).topk(width)  # [1, k]
    tokens = [vocabulary.to_target(best.indices[0])]
    joint = [best.values[0]]  # log probability of the path that ends in a node
    parents = [torch.full((width,), ROOT, device=logits.device)]
    drafted = width
    unread = torch.arange(width, device=logits.device)  # nodes to read next
    above = torch.zeros_like(unread)
    for depth in range(1, shape.depth):
        seen = _seen_by(above, seen)
        logits = yield Level(torch.cat(tokens)[unread], above, depth, seen)
        best = logits.float().log_softmax(-1).topk(width)  # [m, k]
        tokens.append(vocabulary.to_target(best.indices).flatten())
        joint.append((best.values + torch.cat(joint)[unread, None]).flatten())
        parents.append(unread.repeat_interleave(width))
        chosen = joint[-1].topk(width).indices
        above, unread = chosen // width, drafted + chosen
        drafted += len(tokens[-1])
    # No node is more probable than its parent, which comes before it, so a stable order keeps the tree connected.
    kept = torch.cat(joint).sort(descending=True, stable=True).indices[: shape.num_nodes].sort().values
    renumbered = torch.full((drafted + 1,), ROOT, device=logits.device)  # the last place is the root's
    renumbered[kept] = torch.arange(len(kept), device=logits.device)
    return DraftTree(torch.cat(tokens)[kept], renumbered[torch.cat(parents)[kept]])


def _seen_by(parents: Tensor, above: Tensor) -> Tensor:
    """``Level.seen`` of nodes whose parents are at ``[m]`` in the level before, which itself saw ``above``."""
    return torch.cat([above[parents], torch.eye(len(parents), dtype=torch.bool, device=parents.device)], dim=1)
