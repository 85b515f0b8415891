"""One training problem for every contender: weights of a drafter, features of a target, tokens, a loss mask.

It imports torch alone, because a contender may live in an environment that has nothing of ours.
T = tokens (one document), H = hidden size, V / Vd = target / draft vocabulary, S = steps of the training-time test, or
tokens that a draft of P-EAGLE has.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("eagle3", "p_eagle", "dflash")
STEP_DECAY = 0.8
SHARE_DECAY, LEAST_SHARE = 0.7, 0.2  # of P-EAGLE's positions, from one token of a draft to the next
DRAWS = 1  # the seed of what is drawn at every step
MASK_TOKEN = 0
LAYERS = (2, 8, 13)
HEAD_DIM = 64
EPSILON = 1e-5
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the drafter and its data."""

    family: str = "eagle3"
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 2
    vocab_size: int = 32_000
    draft_vocab_size: int = 32_000
    tokens: int = 1024
    num_layers: int = 1
    steps: int = 5
    block_size: int = 8
    """Of DFlash: the slots of a block."""
    anchors: int = 512
    """Of DFlash: the blocks that are learned from, on average."""
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

    def drawn(self) -> list[Tensor]:
        """The positions that each token of a draft is learned from, bool ``[T]``, where some are drawn by chance: of
        P-EAGLE ever fewer, of DFlash the same blocks for all. Chances are what torch's own generator gives first after
        ``torch.manual_seed(DRAWS)``, so that all contenders draw alike."""
        chances = torch.rand(len(self.loss_mask), generator=torch.Generator().manual_seed(DRAWS))
        if self.shape.family == "dflash":
            shares = [self.kept] * (self.shape.block_size - 1)
        else:
            shares = [max(SHARE_DECAY**step, LEAST_SHARE) for step in range(self.shape.steps)]
        return [self._asked(step) & (chances < share) for step, share in enumerate(shares)]

    @property
    def kept(self) -> float:
        """The share of the positions that DFlash's blocks begin at, of EAGLE's all."""
        return min(1.0, self.shape.anchors / self.loss_mask[1:].sum().item()) if self.shape.family == "dflash" else 1.0

    def _asked(self, step: int) -> Tensor:
        """The positions that ``2 + step`` tokens to learn follow, bool ``[T]``: a draft begins behind the first."""
        learned = torch.cat([self.loss_mask, self.loss_mask.new_zeros(2 + step)])
        return learned.unfold(0, 2 + step, 1)[1 : 1 + len(self.loss_mask)].all(-1)


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    """The problem of a seed: the same numbers in every process."""
    generator = torch.Generator().manual_seed(seed)
    h, heads, kv_heads = shape.hidden_size, shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(size, generator=generator) * std

    head = normal(shape.vocab_size, h, std=0.08)  # the target's distributions are neither flat nor certain
    draft_ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values

    def layer(name: str, width: int) -> dict[str, Tensor]:
        return {
            f"{name}.input_layernorm.weight": torch.ones(h),
            f"{name}.post_attention_layernorm.weight": torch.ones(h),
            f"{name}.self_attn.q_proj.weight": normal(heads, width),
            f"{name}.self_attn.k_proj.weight": normal(kv_heads, width),
            f"{name}.self_attn.v_proj.weight": normal(kv_heads, width),
            f"{name}.self_attn.o_proj.weight": normal(h, heads),
            f"{name}.mlp.gate_proj.weight": normal(shape.intermediate_size, h),
            f"{name}.mlp.up_proj.weight": normal(shape.intermediate_size, h),
            f"{name}.mlp.down_proj.weight": normal(h, shape.intermediate_size),
        }

    weights = {"fc.weight": normal(h, len(LAYERS) * h), "norm.weight": torch.ones(h)}
    if shape.family == "dflash":
        weights["hidden_norm.weight"] = torch.ones(h)
        for index in range(shape.num_layers):
            weights |= layer(f"blocks.{index}", h)
            weights |= {
                f"blocks.{index}.self_attn.{norm}.weight": torch.ones(HEAD_DIM) for norm in ("q_norm", "k_norm")
            }
    else:
        weights |= layer("midlayer", 2 * h) | {"midlayer.hidden_norm.weight": torch.ones(h)}
        for index in range(shape.num_layers - 1):
            weights |= layer(f"later.{index}", h)
    if shape.family == "p_eagle":
        weights["mask_hidden"] = normal(1, 1, len(LAYERS) * h, std=1.0)
    weights["lm_head.weight"] = head[draft_ids].clone()
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
    """A training step under measurement: a loss of a problem, backward, AdamW, whose update is ``fused`` where the
    trainer of the same project fuses it."""

    def __init__(
        self, loss: Callable[[Problem], Tensor], parameters: Iterable[Tensor], fused: bool | None = None
    ) -> None:
        self.loss = loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.initial = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.0, fused=fused)

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
