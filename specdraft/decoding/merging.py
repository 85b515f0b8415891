"""Merging draft trees: several drafts for the same texts become one tree (SpecInfer, 2305.09781, section 3).

B = requests, N = nodes of all drafts together, V = vocabulary.

Every node keeps the q that it was drawn from. A path that several drafted is continued by what each of them says after
it: all its continuations hang on the first of its nodes. Of chosen tokens that first node is enough. A token that was
drawn twice stays two attempts, with a q each: the second one always fails, but what the target has left after it is
less than before, and a rule that leaves it out emits another distribution."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdraft.decoding.tree import ROOT, DraftTrees


def merge(drafts: Sequence[DraftTrees], vocab_size: int | None) -> DraftTrees:
    """One tree for each request; of siblings the nodes of the first draft are tried first. The drafts must have been
    drawn independently of each other. ``vocab_size``: V, if tokens were drawn, and chosen ones beside them are point
    masses; None: all of them were chosen."""
    drafts = [draft for draft in drafts if draft.num_nodes] or drafts[:1]
    q = None if vocab_size is None else torch.cat([draft.distributions(vocab_size) for draft in drafts], dim=1)
    if len(drafts) == 1:
        return replace(drafts[0], q=q)
    tokens = torch.cat([draft.tokens for draft in drafts], dim=1)  # [B, N]
    alive = torch.cat([draft.beneath(torch.ones_like(draft.tokens, dtype=torch.bool)) for draft in drafts], dim=1)
    parents, first = [], 0  # the number of a draft's first node
    for draft in drafts:
        parents.append(torch.where(draft.parents == ROOT, ROOT, draft.parents + first))
        first += draft.num_nodes
    depth, width = max(draft.depth for draft in drafts), sum(draft.width for draft in drafts)
    above = torch.cat(parents, dim=1)
    for _ in range(depth - 1):  # right on one more level each time
        above = torch.where(above == ROOT, ROOT, _first_equals(tokens, above, alive).gather(1, above.clamp(min=0)))
    if vocab_size is None:
        alive = alive & (_first_equals(tokens, above, alive) == torch.arange(first, device=tokens.device))
    # What is no draft comes last, so that no place among siblings is lost on it.
    order = (~alive).int().argsort(dim=1, stable=True)
    above = torch.where(alive & (above != ROOT), order.argsort(dim=1).gather(1, above.clamp(min=0)), ROOT)
    tokens, above, alive = (part.gather(1, order) for part in (tokens, above, alive))
    if q is not None:
        q = q.gather(1, order[..., None].expand_as(q))
    return DraftTrees(tokens, above, q, alive, depth=depth, width=width)


def _first_equals(tokens: Tensor, parents: Tensor, alive: Tensor) -> Tensor:
    """Of every node the first of its siblings that has its token, or it itself, ``[B, N]``."""
    same = (parents[..., None] == parents[:, None]) & (tokens[..., None] == tokens[:, None]) & alive[:, None]
    same = same | torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return same.int().argmax(-1)
