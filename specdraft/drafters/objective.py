"""What trained drafters minimize, and what they count on the way: one function for all of them.

n = supervised positions of a step, H = hidden size, Vd = draft vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdraft.drafters.base import TrainingLoss
from specdraft.errors import UserError
from specdraft.losses.chunked import Head, Step, StepResult, Teacher, distillation_loss
from specdraft.losses.divergence import Divergence

T = TypeVar("T")


class DraftHead(nn.Linear):
    """A projection to the draft vocabulary that can lend its weight to a loss which fuses the projection. Both go
    through ``forward`` because ZeRO-3 gathers a partitioned weight only while its module is called, and once more when
    a gradient comes back to a tensor that the call returned."""

    decodes_as_linear = True  # see ``onednn.py``

    def forward(self, given: Tensor | Callable[[Tensor], Any]) -> Any:
        """Logits ``[..., Vd]`` of hidden states ``[..., H]``, or what a function makes of the weight ``[Vd, H]``."""
        return super().forward(given) if isinstance(given, Tensor) else given(self.weight)


def lending_head(model: PreTrainedModel) -> DraftHead:
    """The model's head, with the same weight, as a ``DraftHead``. Raises UserError if the loss cannot fuse it."""
    head: Any = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None or cap is not None:
        wanted = "one without bias and final_logit_softcapping, which the loss can fuse; choose another architecture"
        raise UserError(f"the head of {type(model).__name__} is not a plain projection: expected {wanted}")
    lending = DraftHead(head.in_features, head.out_features, bias=False, device="meta")
    lending.weight = head.weight
    return lending


def call_with_weights(heads: Sequence[DraftHead], use: Callable[[list[Tensor]], T]) -> T:
    """What ``use`` makes of the heads' weights, all there at once: each head is called inside the one before."""
    if not heads:
        return use([])
    first, *others = heads
    # A function inside that calls itself would hold a step's graph until Python looks for garbage.
    return first(lambda weight: call_with_weights(others, lambda weights: use([weight, *weights])))


def objective(
    weights: Tensor | Sequence[Head], teacher: Teacher, steps: Sequence[Step], divergence: Divergence
) -> TrainingLoss:
    """The loss of a draft's steps, at least one, each a position further than the one before, and ``step_metrics``."""
    loss, results = distillation_loss(weights, teacher, steps, divergence)
    return TrainingLoss(loss, step_metrics(steps, results), (steps[0].positions, results[0].matched))


def step_metrics(steps: Sequence[Step], results: Sequence[StepResult]) -> dict[str, Tensor]:
    """Per step i: loss_sum, alpha_sum (expected acceptances of a sampled token), match_sum (the draft's best token is
    the target's, at every step so far), each over ``total`` positions. Of the first step also out_of_vocabulary_mass:
    the probability that the target gives to tokens which cannot be drafted."""
    metrics: dict[str, Tensor] = {}
    matched = results[0].matched
    for index, (step, result) in enumerate(zip(steps, results, strict=True)):
        if index > 0:  # a position that was left out needs no prefix: they only ever get fewer
            kept = torch.searchsorted(steps[index - 1].positions + 1, step.positions)
            matched = matched[kept] & result.matched
        metrics[f"step_{index}/loss_sum"] = result.loss_sum
        metrics[f"step_{index}/alpha_sum"] = result.alpha_sum
        metrics[f"step_{index}/match_sum"] = matched.sum()
        metrics[f"step_{index}/total"] = torch.full((), len(matched), device=matched.device)
    total = metrics["step_0/total"]
    metrics["out_of_vocabulary_mass_sum"] = total - results[0].mass_sum
    metrics["out_of_vocabulary_mass_total"] = total
    return metrics
