"""Block verification: an exact rule for sampled chains that judges a draft as a whole (2403.10444, algorithm 2).

B = requests, N = tokens of a chain, V = vocabulary.

Rejection sampling decides token by token, and what a token had to spare (p > q) is lost to those after it. Here it is
carried along: with P_0 = 1 and P_i = min(1, P_(i-1) p(x_i) / q(x_i)), a chain is accepted up to its last token i with

    u_i <= S_i / (S_i + 1 - P_i),        S_i = sum over x of max(P_i p(x) - q(x), 0),  p and q of the token after x_i

and the next token is drawn from what max(P_i p - q, 0) leaves. After the last drafted token q is nothing, so that S_i =
P_i, and the next token is drawn from p. No rule that emits the target's distribution accepts more of a chain."""

import torch
from torch import Tensor

from specdraft.decoding.rules import Rule, Verdict, rejection_sampling, verdict
from specdraft.decoding.sampling import sample
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.errors import UserError


def block_verification(trees: DraftTrees, p: Tensor, uniform: Tensor) -> Verdict:
    """Exact sampling for sampled chains; see ``rules.Rule``. Chosen tokens have nothing to spare: with them, in chains
    and trees, it is rejection sampling. Raises ValueError for sampled trees with branches."""
    if trees.q is None or not trees.num_nodes:
        return rejection_sampling(trees, p, uniform)
    if not trees.is_chain:
        raise ValueError("block verification is for chains: expected drafts without branches")
    alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))  # [B, N]
    p, q = p.double(), trees.q.double() * alive[..., None]  # differences of almost equal numbers
    p_drafted, q_drafted = (each.gather(2, trees.tokens[..., None])[..., 0] for each in (p[:, :-1], q))
    ratios = torch.where(alive, p_drafted / q_drafted, 0.0)
    weights = [torch.ones_like(ratios[:, 0])]  # P_0 to P_N
    for place in range(trees.num_nodes):
        weights.append((weights[-1] * ratios[:, place]).clamp(max=1.0))
    weight = torch.stack(weights, dim=1)  # [B, N + 1]
    left = (weight[..., None] * p - torch.nn.functional.pad(q, (0, 0, 0, 1))).clamp(min=0.0)  # [B, N + 1, V]
    spare = left.sum(-1)
    # Where nothing is left because p and q are equal, the next token is never rejected.
    stopping = (spare / (spare + 1 - weight)).nan_to_num(0.0)
    index = torch.arange(1, trees.num_nodes + 1, device=p.device)
    count = (index * (alive & (uniform[:, 1:] < stopping[:, 1:]))).amax(-1)
    row = torch.arange(len(p), device=p.device)
    rest = torch.where(spare[row, count, None] > 0, left[row, count], p[row, count])
    return verdict(trees, index <= count[:, None], lambda end: sample(rest, uniform[:, 0]))


def check_shape(rule: Rule, shape: object, branches: bool = False) -> None:
    """Raises UserError for block verification of drafts that are no chains; ``branches``: whatever their shape."""
    if getattr(rule, "func", rule) is not block_verification:
        return
    if branches:
        merged = "decoding/rule=block cannot verify an ensemble, whose drafts have branches"
        raise UserError(f"{merged}: expected decoding/rule=exact")
    if not (isinstance(shape, StaticTree) and shape.is_chain):
        given = shape if isinstance(shape, Shape) else "a tree that is measured"
        raise UserError(f"decoding/rule=block cannot verify a {given}: expected decoding/shape=chain")
