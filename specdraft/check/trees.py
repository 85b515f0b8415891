"""Draft trees: every node follows from its own path."""

from functools import partial

import torch

from specdraft.check.outcome import Failed, NotApplicable
from specdraft.check.rounds import BUSH, Asked, Recording
from specdraft.check.subject import Subject
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, Shape
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.errors import UserError

SHAPES: tuple[Shape, ...] = (BUSH, DynamicTree(3, 3, 8))


def nodes_follow_their_paths(subject: Subject) -> str:
    """The children of every node of a tree beside a chain that is made to go along the node's path. A difference is a
    node that sees its siblings or loses its parents: trees are then accepted no better than chains, and cost more."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    if not drafter.draws:
        raise NotApplicable("it chooses its tokens, and does not say what follows a node")
    checked, said = 0, []
    for shape in SHAPES:
        try:
            drafter.num_places(shape)
        except UserError as error:
            said.append(str(error))
            continue
        recording = Recording(drafter, target, shape, ask=partial(_ask, drafter.whole_drafts or 0))
        recording.run(subject.prompts[:3], 8, batch_size=3)
        checked += sum(len(draft.tokens) for each in recording.found for draft in each)
    if len(said) == len(SHAPES):
        raise NotApplicable(f"it draws no trees: {said[0]}")
    return f"{checked} nodes of static and dynamic trees, each beside a chain along its path"


def _ask(levels: int, asked: Asked, shape: Shape) -> DraftTrees:
    trees = asked.draft(shape, Sampling())
    for row in range(len(trees.tokens)):
        _check(asked, trees, row, min(levels, shape.depth))
    return trees


def _check(asked: Asked, trees: DraftTrees, row: int, levels: int) -> None:
    """Raises Failed for a node of this row that a chain along its path, of so many levels at least, does not have."""
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    there = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))[row].tolist()
    children: dict[tuple[int, ...], list[int]] = {}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if there[node]:
            paths[node] = (*paths[parent], token)
            children.setdefault(paths[parent], []).append(token)
    for path, found in children.items():
        depth = max(len(path) + 1, levels)
        along = torch.zeros((len(trees.tokens), depth), dtype=torch.int64, device=trees.tokens.device)
        along[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
        width = max(trees.width, len(found))
        forced = asked.draft(ForcedPath(along, width), Sampling()).tokens[row]
        whole = len(forced) == depth * width  # unless it ended early
        best = forced.view(depth, width)[len(path)].tolist() if whole else forced.tolist()
        if found != best[: len(found)]:
            mend = "follow `parents` and `seen` of the level, and its depth"
            says = f"after the path {list(path)} the tree has {found}, a chain along it {best[: len(found)]}"
            raise Failed(f"{says}: expected the same; {mend}")
