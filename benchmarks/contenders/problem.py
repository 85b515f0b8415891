"""One training problem for every contender: weights of a head, features of a target, tokens, a loss mask.

It imports torch alone, because a contender may live in an environment that has nothing of ours.
T = tokens (one document), H = hidden size, V / Vd = target / draft vocabulary, S = steps of the training-time test.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEP_DECAY = 0.8
LAYERS = (2, 8, 13)
HEAD_DIM = 64
EPSILON = 1e-5
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the head and its data."""

    hidden_size: int = 512
    intermediate_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 2
    vocab_size: int = 32_000
    draft_vocab_size: int = 32_000
    tokens: int = 1024
    steps: int = 5
    first_supervised: int = 0
    """The first token to learn: 0 supervises all, T/2 leaves out a prompt of half the length."""


@dataclass(frozen=True)
class Problem:
    """What a contender gets. weights: by the names of our checkpoints; embedding, head: the target's, ``[V, H]``."""

    shape: Shape
    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    draft_ids: Tensor  # [Vd]
    input_ids: Tensor  # [T]
    aux: Tensor  # [T, 3H]
    last: Tensor  # [T, H], after the final norm
    loss_mask: Tensor  # [T] bool, True on the tokens to learn

    def part(self, tokens: int) -> "Problem":
        """The same problem with its last ``tokens`` tokens alone."""
        cut = {name: getattr(self, name)[-tokens:] for name in ("input_ids", "aux", "last", "loss_mask")}
        return Problem(**{**self.__dict__, **cut})


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    """The problem of a seed: the same numbers in every process."""
    generator = torch.Generator().manual_seed(seed)
    h, heads, kv_heads = shape.hidden_size, shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(size, generator=generator) * std

    head = normal(shape.vocab_size, h, std=0.08)  # the target's distributions are neither flat nor certain
    draft_ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    layer, norms = "midlayer.", ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights = {
        "fc.weight": normal(h, len(LAYERS) * h),
        **{f"{layer}{name}.weight": torch.ones(h) for name in norms},
        f"{layer}self_attn.q_proj.weight": normal(heads, 2 * h),
        f"{layer}self_attn.k_proj.weight": normal(kv_heads, 2 * h),
        f"{layer}self_attn.v_proj.weight": normal(kv_heads, 2 * h),
        f"{layer}self_attn.o_proj.weight": normal(h, heads),
        f"{layer}mlp.gate_proj.weight": normal(shape.intermediate_size, h),
        f"{layer}mlp.up_proj.weight": normal(shape.intermediate_size, h),
        f"{layer}mlp.down_proj.weight": normal(h, shape.intermediate_size),
        "norm.weight": torch.ones(h),
        "lm_head.weight": head[draft_ids].clone(),
    }
    return Problem(
        shape,
        weights,
        embedding=normal(shape.vocab_size, h),
        head=head,
        draft_ids=draft_ids,
        input_ids=torch.randint(shape.vocab_size, (shape.tokens,), generator=generator),
        aux=normal(shape.tokens, len(LAYERS) * h, std=1.0),
        last=normal(shape.tokens, h, std=1.0),
        loss_mask=torch.arange(shape.tokens) >= shape.first_supervised,
    )


class Contender:
    """A training step under measurement: a loss of a problem, backward, AdamW."""

    def __init__(self, loss: Callable[[Problem], Tensor], parameters: Iterable[Tensor]) -> None:
        self.loss = loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.initial = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.0)

    def step(self, problem: Problem) -> float:
        """One optimizer step; returns the loss before it. Gradients are freed first, as trainers do."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(problem)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def rewind(self) -> None:
        """Back to the initial weights, keeping the optimizer's tensors allocated but empty."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, initial in zip(self.parameters, self.initial, strict=True):
            parameter.copy_(initial)
        states: list[dict[str, Any]] = list(self.optimizer.state.values())
        for state in states:
            for value in state.values():
                value.zero_()
