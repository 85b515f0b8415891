"""The plain step: the mask of all steps as one matrix, every logit at once, gradients by autograd alone.

Written from the paper (EAGLE-3, 2503.01840, section 3.2), not from our fast path, so that it also checks it.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, kl_div, linear, rms_norm, silu

from contenders.problem import EPSILON, HEAD_DIM, ROPE_THETA, STEP_DECAY, Contender, Problem


def build(problem: Problem) -> Contender:
    """The problem's weights as bare parameters."""
    weights = {name: tensor.clone().requires_grad_() for name, tensor in problem.weights.items()}
    return Contender(lambda given: training_loss(weights, given), weights.values())


def training_loss(weights: dict[str, Tensor], problem: Problem) -> Tensor:
    """Sum over steps s of decay^s times the mean KL of the step's supervised rows."""
    steps, rows = problem.shape.steps, len(problem.input_ids)
    heads, kv_heads = problem.shape.num_heads, problem.shape.num_kv_heads
    row = torch.arange(rows)
    tokens = torch.cat([problem.input_ids, problem.input_ids.new_zeros(steps)])
    learnt = torch.cat([problem.loss_mask, torch.zeros(steps + 1, dtype=torch.bool)])
    teacher = linear(problem.last, problem.head)[:, problem.draft_ids].log_softmax(-1)  # [T, Vd]
    teacher = torch.cat([teacher, teacher.new_zeros(steps, teacher.shape[1])])
    visible = torch.eye(rows, dtype=torch.bool).repeat(steps, steps)  # [S*T, S*T]: own row of every step
    visible[:, :rows] |= row <= row.repeat(steps)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], EPSILON)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"midlayer.{name}.weight"])

    def by_head(x: Tensor) -> Tensor:
        return x.view(rows, -1, HEAD_DIM).transpose(0, 1)  # [heads, T, d]

    feature = linear(problem.aux, weights["fc.weight"])
    keys, values = [], []
    supervised = learnt[1 : rows + 1]
    loss = feature.new_zeros(())
    for step in range(steps):
        embedded = norm(
            embedding(tokens[row + 1 + step if step < steps else row], problem.embedding), "midlayer.input_layernorm"
        )
        x = torch.cat([embedded, norm(feature, "midlayer.hidden_norm")], dim=-1)  # [T, 2H]
        query = rotate(by_head(project(x, "self_attn.q_proj")), row + step)
        keys.append(rotate(by_head(project(x, "self_attn.k_proj")), row + step))
        values.append(by_head(project(x, "self_attn.v_proj")))
        key, value = (torch.cat(past, dim=1).repeat_interleave(heads // kv_heads, dim=0) for past in (keys, values))
        scores = query @ key.transpose(1, 2) / HEAD_DIM**0.5  # [heads, T, (s+1)*T]
        seen = visible[step * rows : (step + 1) * rows, : (step + 1) * rows]
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        hidden = feature + project(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
        x = norm(hidden, "midlayer.post_attention_layernorm")
        feature = hidden + project(silu(project(x, "mlp.gate_proj")) * project(x, "mlp.up_proj"), "mlp.down_proj")

        log_q = linear(norm(feature, "norm"), weights["lm_head.weight"]).log_softmax(-1)  # [T, Vd]
        log_p = teacher[1 + step : 1 + step + rows]
        divergence = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        supervised = supervised & learnt[2 + step : 2 + step + rows]
        loss = loss + STEP_DECAY**step * (divergence * supervised).sum() / supervised.sum()
    return loss


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[heads, T, d]``, halves paired as in Llama."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies).repeat(1, 2)  # [T, d]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
