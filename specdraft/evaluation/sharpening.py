"""How sure a draft is: logits times the number with which most sampled drafts are accepted.

A token that is drawn from a draft's distribution q is accepted with the probability sum min(p, q) (Leviathan et al.,
2211.17192, theorem 3.5). Forward KL, by which drafters learn, spreads q over all that the target may say; what cannot
tell which of it is accepted more often if q is surer. One factor keeps the order of all tokens: greedy drafts stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.data.packing import pack
from specdraft.data.tokenization.chat import Example
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.objective import DraftHead
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

FACTORS = tuple(round(0.8 + 0.05 * step, 2) for step in range(17))  # up to 1.6
_BATCH = 8  # prompts answered side by side


@dataclass(frozen=True)
class Sharpness:
    """``factor``: what the logits were multiplied by. ``before``, ``after``: how often a sampled token is accepted, by
    its position in the draft, on the ``tokens`` that it was found with; the drafts before it are the text's own."""

    factor: float
    before: list[float]
    after: list[float]
    tokens: int


def own_heads(drafter: "Drafter") -> list[DraftHead]:
    """The projections that a drafter's logits are sums of. Raises UserError where others read their weights, too."""
    heads = [module for module in drafter.modules() if isinstance(module, DraftHead)]
    others = [module for module in drafter.modules() if not isinstance(module, DraftHead)]
    read = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    if not heads or any(id(head.weight) in read for head in heads) or drafter.quantization is not None:
        wanted = "a projection to the vocabulary of its own, as of EAGLE-3, Medusa and DFlash, not quantized"
        raise UserError(f"the logits of {drafter.family} cannot be scaled: expected {wanted}")
    return heads


@torch.no_grad()
def scale_logits(drafter: "Drafter", factor: float) -> None:
    """Multiply them, in the weights. Raises UserError as ``own_heads``."""
    for head in own_heads(drafter):
        head.weight.mul_(factor)


@torch.inference_mode()
def best_sharpness(
    drafter: "Drafter",
    target: "Target",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int = 0,
    progress: bool = True,
) -> Sharpness:
    """That of ``FACTORS`` of which the target's answers at temperature 1 to ``prompts`` (token ids) promise the longest
    sampled drafts. The drafter, in the target's dtype, stays as it is. Raises UserError as ``own_heads`` and
    ``Decoder``."""
    heads = own_heads(drafter.eval())
    weights = [head.weight.detach().clone() for head in heads]
    seeds = [seed + number for number in range(len(prompts))]
    answers = Decoder(target, sampling=Sampling(1.0)).generate_batch(prompts, max_new_tokens, _BATCH, seeds)
    found: dict[float, Tensor] = dict.fromkeys(FACTORS, torch.zeros(2, 1, dtype=torch.float64))
    pairs = zip(prompts, answers, strict=True)
    for prompt, answer in tqdm(pairs, "sharpening", len(prompts), unit="answer", disable=not progress):
        said = Example([*prompt, *answer.tokens], [False] * len(prompt) + [True] * len(answer.tokens))
        batch = pack([said], len(said.input_ids))[0].to(target.device)
        features = batch.features(target, drafter.layers)
        for factor in FACTORS:
            for head, weight in zip(heads, weights, strict=True):
                head.weight.data.copy_(weight * factor)
            found[factor] = found[factor] + _counts(drafter.training_loss(batch, features, target).metrics)
    for head, weight in zip(heads, weights, strict=True):
        head.weight.data.copy_(weight)
    rates = {factor: (sums / totals.clamp(min=1)).tolist() for factor, (sums, totals) in found.items()}
    best = max(FACTORS, key=lambda factor: _length(rates[factor]))
    return Sharpness(best, rates[1.0], rates[best], int(found[1.0][1, 0]))


def _counts(metrics: dict[str, Tensor]) -> Tensor:
    """``[2, S]``: by position of the draft the sum of what is accepted, and of how many."""
    steps = [name.removesuffix("alpha_sum") for name in metrics if name.endswith("/alpha_sum")]
    pairs = [[float(metrics[f"{step}alpha_sum"]), float(metrics[f"{step}total"])] for step in steps]
    return torch.tensor(pairs, dtype=torch.float64).T


def _length(rates: Sequence[float]) -> float:
    """Of a round, if each draft is accepted as often as ``rates`` say."""
    return 1 + sum(accumulate(rates, mul))
