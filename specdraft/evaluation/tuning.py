"""Drafters that change their target: what is decoded with instead, and how far that is from what was there before.

T = tokens of an answer, V = vocabulary.

Drafting is lossless to the tuned model, so that no comparison of its own answers shows what it has lost. Its distance
from the target is measured on the target's own greedy answers: a tuned model that has come to repeat itself would find
the target's agreement on its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.targets import LanguageModel

if TYPE_CHECKING:
    from specdraft.targets import Target


@dataclass(frozen=True)
class Distance:
    """Of a tuned model from the target before: ``greedy_agreement``, the share of the greedy tokens of the target that
    are the tuned model's as well, after the same text; ``divergence``, the mean KL(target, tuned) there, in nats; over
    how many ``tokens``."""

    greedy_agreement: float
    divergence: float
    tokens: int


def tuned_target(target: "Target", drafter: Drafter, others: Sequence[Drafter] = ()) -> "Target":
    """What decodes with ``drafter``, and with ``others`` beside it: the target itself, unless the drafter tunes it.
    Raises UserError for one that tunes the target inside or beside another drafter, or beside what was trained for the
    target as it was."""
    hidden = [*others, *(each for each in drafter.modules() if each is not drafter)]
    changing = [each.family for each in hidden if isinstance(each, Drafter) and each.tunes_target]
    if changing:
        wanted = "it alone, as the one checkpoint=; what needs no training may stand beside it in compare="
        raise UserError(f"{changing[0]} changes the target that other drafters draft for: expected {wanted}")
    if not drafter.tunes_target:
        return target
    if trained := [each.family for each in others if next(each.parameters(), None) is not None]:
        wanted = "only drafters that need no training beside it"
        raise UserError(f"{drafter.family} changes the target that {trained[0]} was trained for: expected {wanted}")
    return drafter.tuned(target)


class Answers:
    """What the target says to some prompts, greedily: texts on which tuned models are compared with it."""

    def __init__(self, target: "Target", prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Decode them plainly."""
        decoder = Decoder(target)
        self.target = target
        self.texts = [(list(ids), decoder.generate(ids, max_new_tokens).tokens) for ids in prompts]

    @torch.inference_mode()
    def distance(self, tuned: LanguageModel) -> Distance:
        """Of ``tuned``, after every token that the target read before it said the next."""
        agreed = divergence = torch.zeros((), dtype=torch.float64)
        tokens = 0
        for before, after in zip(self._logits(self.target), self._logits(tuned), strict=True):
            log_p, log_q = before.double().log_softmax(-1), after.double().log_softmax(-1)  # [T, V]
            agreed = agreed + (before.argmax(-1) == after.argmax(-1)).sum().cpu()
            divergence = divergence + (log_p.exp() * (log_p - log_q)).sum().cpu()
            tokens += len(before)
        return Distance((agreed / tokens).item(), (divergence / tokens).item(), tokens)

    def _logits(self, model: LanguageModel) -> Iterator[Tensor]:
        """Of each answer ``[T, V]``."""
        for prompt, answer in self.texts:
            ids = torch.tensor([prompt + answer[:-1]], device=model.device)
            features = model.features(ids, torch.arange(ids.shape[1], device=ids.device)[None])
            yield model.logits(features.last[0, len(prompt) - 1 :])


def about(settings: Mapping[str, object]) -> str | None:
    """In words, of the settings of an evaluation: which target was changed, by what, and how far; None: none was."""
    found, target = settings.get("tuning"), settings.get("target")
    if not isinstance(found, Mapping) or not isinstance(target, Mapping):
        return None
    name = str(target["name"]).removesuffix(", tuned")
    by = f"{name}, tuned by {found['by']}" if found["by"] else str(target["name"])
    same, far = f"{100 * found['greedy_agreement']:.1f} %", f"{found['divergence']:.3f}"
    return (
        f"{by}: it says {same} of the greedy tokens that the target says, mean KL {far} over {found['tokens']} tokens"
    )
