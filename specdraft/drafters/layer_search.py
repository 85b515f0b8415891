"""Which layers a target can do without: a search on one text for the set that changes least of what it says.

T = tokens of the text, V = vocabulary."""

import torch
from torch import Tensor

from specdraft.decoding.passes import Pass
from specdraft.errors import warn
from specdraft.targets import LanguageModel
from specdraft.targets.partial import without_layers

_TRIES = 64  # sets that are compared
_TOKENS = 512  # of the text, at most


@torch.inference_mode()
def search_layers(target: LanguageModel, count: int, text: Tensor, tries: int = _TRIES, seed: int = 0) -> set[int]:
    """``count`` layers (numbers from 0) whose absence leaves the most of the target's distributions over ``text [T]``:
    the mean of sum_x min(p(x), q(x)), how often a token drawn without them would be accepted. Beginning with layers
    that lie evenly, one is exchanged at random as often as ``tries``, and the better set is kept. Skipped layers are
    missing for all of the text here, where a draft finds the whole target's keys of what it has read."""
    generator = torch.Generator().manual_seed(seed)
    reading = Pass.prompt(text[:_TOKENS].tolist(), target.device)
    cache = target.new_cache(1, reading.size)

    def distributions(model: LanguageModel) -> Tensor:
        return model.logits(model.step(reading, cache).last)[0].float().softmax(-1)  # [T, V]

    whole = distributions(target)

    def overlap(skipped: set[int]) -> float:
        return float(torch.minimum(whole, distributions(without_layers(target, skipped))).sum(-1).mean())

    def one_of(layers: set[int]) -> int:
        return sorted(layers)[int(torch.randint(len(layers), (), generator=generator))]

    every = set(range(target.num_layers))
    best = {(2 * number + 1) * target.num_layers // (2 * count) for number in range(count)}
    found = overlap(best)
    for _ in range(tries):
        other = best - {one_of(best)} | {one_of(every - best)}
        if (score := overlap(other)) > found:
            best, found = other, score
    told = f"{found:.0%} of the target's distribution over the first prompt stays; drafter.skip_layers={sorted(best)}"
    warn(f"early exit skips {count} of {target.num_layers} layers: {told} names them")
    return best
