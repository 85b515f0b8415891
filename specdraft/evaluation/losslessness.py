"""Are greedy tokens the target's own? Where they differ, whether rounding explains it.

A pass over K + 1 tokens rounds differently from a pass over one, so that two tokens whose logits almost tie may change
places. A wrong rule changes tokens whose logits are far apart. The logit gap at the first difference tells the two
apart; from there on the texts differ, and nothing can be compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from specdraft.decoding.passes import Pass
from specdraft.decoding.penalties import penalized
from specdraft.decoding.sampling import Sampling

if TYPE_CHECKING:
    from specdraft.targets import Target

# Largest gap, in units in the last place (ulp) of the larger logit, that rounding is taken to explain. Over the
# embedded target's answers, read one by one, six by six and all at once, the gap between the two best tokens changed by
# at most 3 ulps in bfloat16, 2 in float16 and 10 in float32, where sums round as well. Larger targets round more often:
# about three times as much is allowed.
ALLOWED_ULPS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 32, torch.float64: 32}


@dataclass(frozen=True)
class Difference:
    """The first token in which two greedy answers differ. gap: between the target's logits of the two tokens there.
    ulps: the gap in units in the last place of the larger of the two, in the target's dtype; infinite where one answer
    is a beginning of the other."""

    position: int
    gap: float
    ulps: float
    near_tie: bool


@torch.inference_mode()
def first_difference(
    target: "Target", prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int], sampling: Sampling
) -> Difference | None:
    """Where ``drafted`` departs from ``plain``, both made with ``sampling``, with the target's logits computed again
    behind what they share."""
    pairs = enumerate(zip_longest(plain, drafted))
    position, tokens = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, None))
    if tokens is None:
        return None
    if None in tokens:
        return Difference(position, math.inf, math.inf, near_tie=False)
    text = [*prompt, *plain[:position]]
    features = target.step(Pass.prompt(text, target.device), target.new_cache(1, len(text)))
    logits = penalized(target.logits(features.last[:, -1])[0], sampling, prompt, plain[:position])
    own, other = logits[list(tokens)].double().tolist()
    gap = abs(own - other)
    largest = max(abs(own), abs(other), torch.finfo(target.dtype).tiny)
    ulps = gap / (torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(largest)))
    return Difference(position, gap, ulps, near_tie=ulps <= ALLOWED_ULPS[target.dtype])
