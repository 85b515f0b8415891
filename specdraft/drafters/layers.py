"""What drafters' layers are made of that look like a layer of the target: its shape, first weights, and projections.

N = positions of a pass, Hq / Hk = query / key-value heads, d = head size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from specdraft.targets import Target

ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position's angle depends on how long the text is


class Projections(nn.Module):
    """The projections of an attention whose queries, keys and values read ``width`` features. qk_norm: a norm of every
    head's query and key before they are rotated, as Qwen3 has it. Where the configuration has an
    ``attention_output_bias``, that says whether the last projection has one. cos, sin: ``[N, d]`` of the rotary
    positions; where they are narrower, the rest of a head is not rotated."""

    def __init__(self, config: LlamaConfig, width: int, qk_norm: bool = False) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim: int = config.head_dim
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(width, heads, bias)
        self.k_proj = nn.Linear(width, kv_heads, bias)
        self.v_proj = nn.Linear(width, kv_heads, bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bool(getattr(config, "attention_output_bias", bias)))
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries ``[N, Hq, d]`` of ``x [N, width]``."""
        return self._rotated(self.q_proj(x), self.q_norm, cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, ``[N, Hk, d]`` of ``x [N, width]``."""
        return self._rotated(self.k_proj(x), self.k_norm, cos, sin), self.v_proj(x).view(len(x), -1, self.head_dim)

    def _rotated(self, projected: Tensor, norm: nn.Module | None, cos: Tensor, sin: Tensor) -> Tensor:
        heads = projected.view(len(projected), -1, self.head_dim)  # [N, heads, d]
        heads = heads if norm is None else norm(heads)
        if cos.shape[-1] == self.head_dim:
            return _turned(heads, cos, sin)
        turned, kept = heads.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat([_turned(turned, cos, sin), kept], dim=-1)


class RMSNorm(LlamaRMSNorm):
    """Llama's norm, in fp32 or wider, that keeps for backward its input alone and a number a row: the normed input and,
    in 16 bits, its fp32 copy are made again."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # a compiler chooses by itself what it keeps
            return _norm(x, self.weight, self.variance_epsilon)[0]
        return _Normed.apply(x, self.weight, self.variance_epsilon)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normed ``x [..., H]``, and what each row is multiplied by, ``[..., 1]``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype), scale


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out, scale = _norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        normed = x.to(scale.dtype) * scale
        if of_weight:
            grad_weight = (gradient * normed.to(x.dtype)).reshape(-1, len(weight)).sum(0).to(weight.dtype)
        if of_x:
            wide = (gradient * weight).to(scale.dtype)
            along = (wide * normed).mean(-1, keepdim=True)  # what makes a row longer changes nothing
            grad_x = wide.addcmul(normed, along, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class GatedMLP(LlamaMLP):
    """A Llama layer's MLP that keeps two of the four tensors of its inner width for backward: the activated gate and
    its product with the other are made again, which takes no product of matrices."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        activation = self.act_fn.forward  # past the hooks of a sharded module, which count its calls
        if torch.compiler.is_compiling():  # chooses by itself what it keeps
            return self.down_proj(activation(gate) * up)
        gated = _Gated.apply(gate, up, activation)
        out = self.down_proj(gated)
        if out.requires_grad and self.down_proj.weight.requires_grad and not _is_checkpointed():
            _make_again(gated, out, lambda: activation(gate) * up)
        return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        with torch.enable_grad():
            gate, up = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            product = ctx.activation(gate) * up
        of_gate, of_up = torch.autograd.grad(product, (gate, up), gradient)
        return of_gate, of_up, None


def _is_checkpointed() -> bool:
    """Whether ``torch.utils.checkpoint`` decides what is kept: it makes all of that again at once."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _make_again(tensor: Tensor, out: Tensor, make: Callable[[], Tensor]) -> None:
    """Free the memory of what ``out`` was made of until the gradient of ``out`` is there, whose way back reads it."""
    waiting, size = [(tensor, make)], tensor.untyped_storage().nbytes()

    def fill(_: Tensor) -> None:
        if waiting:  # once, and then held here no longer
            freed, again = waiting.pop()
            freed.untyped_storage().resize_(size)
            with torch.no_grad():
                freed.data.copy_(again())  # autograd sees no change of what it keeps

    out.register_hook(fill)
    tensor.untyped_storage().resize_(0)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


def shape_of(target: Target, intermediate_size: int | None) -> dict[str, Any]:
    """The arguments of a head shaped like one layer of ``target``; ``intermediate_size`` None is the target's own."""
    config = target.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)  # targets with sliding windows keep one set per kind of layer
    if rope.get("rope_type") in ROPE_BY_LENGTH:  # a head of one layer does with the plain angles
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": {key: value for key, value in rope.items() if key != "partial_rotary_factor"},
        "max_position_embeddings": target.max_length,
    }


def initialize(module: nn.Module) -> None:
    """Weights of linear layers from N(0, 0.02), as the targets' own were; biases zero."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
