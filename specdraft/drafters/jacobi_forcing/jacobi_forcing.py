"""Jacobi Forcing (2512.14681), after consistency models of language (CLLM, 2403.00835): tune the target for Jacobi.

R = positions of the flat batch, M = guesses, H = hidden size, K = drafted tokens.

Jacobi decoding reads guesses and takes what the target says after them as the next guesses. An ordinary target says
nothing useful after a wrong one. Here adapters of the target learn to say there what the target says after the right
tokens: the frozen target's own distributions at those places are the teacher, so that nothing is taught that it would
not say. Beside that the tuned model is held to the frozen target on the clean text.

It is another contract than a drafter's: **the target changes**. What decodes is ``tuned(target)``, verified against
itself; how far it is from the target is for an evaluation to measure."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from specdraft.drafters.base import TrainingLoss, constructor_arguments
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.jacobi_forcing.adapters import Adapters, adapted, find_layers, merged
from specdraft.drafters.jacobi_forcing.noisy_text import NoisyText, Schedule
from specdraft.drafters.objective import step_metrics
from specdraft.errors import UserError
from specdraft.losses.chunked import FrozenHead, Step, Teacher, distillation_loss
from specdraft.losses.divergence import divergence as find_divergence
from specdraft.targets import Features, LanguageModel, Target
from specdraft.targets.batch import Batch
from specdraft.targets.parameters import target_sizes

_ROWS = 512  # guesses whose logits are there at a time


class JacobiForcing(Jacobi):
    """The adapters; it drafts as ``Jacobi`` does."""

    tunes_target = True
    tells_hits = False  # a pass holds guesses of some of the tokens alone
    reads_every_last = False
    training_options = frozenset({"block_size", "noise_steps", "from_text", "own_guesses", "ar_weight", "divergence"})

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        rank: int = 32,
        alpha: int = 64,
        block_size: int = 16,
        noise_steps: int = 4,
        from_text: float = 0.25,
        own_guesses: float = 0.5,
        ar_weight: float = 10.0,
        divergence: str | dict[str, Any] = "forward_kl",
    ) -> None:
        """Build adapters that change nothing yet. shapes: the layers, ``[inputs, outputs]`` by name. rank, alpha: of
        the adapters, whose product counts alpha / rank times. block_size: tokens of a Jacobi state, of which 1/steps,
        2/steps, ... in turn are guesses (``noise_steps``). from_text: the share of the blocks whose guesses are drawn
        from the text before; all others guess the last right token again. own_guesses: the share of the blocks that
        then go on to what the model itself says after those, a state of its own trajectory. ar_weight: of the clean
        positions, where the loss of the guesses counts one. Raises UserError for sizes and shares that are none, and
        for an unknown divergence."""
        arguments = constructor_arguments(locals())
        super().__init__()
        for name, value in (("rank", rank), ("block_size", block_size), ("noise_steps", noise_steps)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"model.drafter.{name} is {value}: expected a positive number")
        for name, share in (("from_text", from_text), ("own_guesses", own_guesses)):
            if not 0 <= share <= 1:
                raise UserError(f"model.drafter.{name} is {share}: expected a share of the blocks from 0 to 1")
        if ar_weight < 0:
            raise UserError(f"model.drafter.ar_weight is {ar_weight}: expected 0 or a positive number")
        self._arguments = arguments
        self.alpha, self.ar_weight = alpha, float(ar_weight)
        self.schedule, self.from_text, self.own_guesses = Schedule(block_size, noise_steps), from_text, own_guesses
        self.divergence = find_divergence(divergence)
        self.adapters = Adapters(shapes, rank)
        self._learning: tuple[Target, LanguageModel] | None = None  # a target, and it with the adapters

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        target_modules: str | Sequence[str] = "all-linear",
        **options: Any,
    ) -> Self:
        """Adapters for the layers of ``target`` that ``target_modules`` names. Raises UserError as
        ``find_layers``, and for a draft vocabulary that is not the whole."""
        if draft_vocabulary is not None and len(draft_vocabulary) != target.vocab_size:
            given = f"the draft vocabulary has {len(draft_vocabulary)} of {target.vocab_size} ids"
            raise UserError(f"{given}: the target itself guesses; expected model.draft_vocab_size=null")
        drafter = cls(find_layers(target, target_modules), **options)
        drafter.bind(target)
        return drafter

    @property
    def draws(self) -> bool:
        """It guesses the most likely tokens."""
        return False

    def tuned(self, target: Target) -> Target:
        """See ``Drafter``: the target with the adapters merged, which is as fast as without any."""
        model, name = merged(target, self.adapters, self.alpha), f"{target.identity.name}, tuned"
        tuned = Target(model, target.tokenizer, name, target.identity.revision)
        if target.packed:
            tuned.pack()
        return tuned

    def learning(self, target: Target) -> LanguageModel:
        """``target`` with the adapters beside its weights, made once."""
        if self._learning is None or self._learning[0] is not target:
            self._learning = target, LanguageModel(adapted(target, self.adapters, self.alpha))
        return self._learning[1]

    def noisy_text(self, batch: Batch, model: LanguageModel) -> NoisyText:
        """The batch and its guesses. Outside training nothing is drawn: every guess is the last right token again."""
        text = NoisyText(batch, self.schedule)
        if self.training:
            text.guess_from_text(self.from_text)
            text.guess_again(self.own_guesses, lambda: self._said(text, model))
        return text

    @torch.no_grad()
    def _said(self, text: NoisyText, model: LanguageModel) -> Tensor:
        """After each guess the model's most likely token ``[M]``."""
        last = _read(text, model)[text.size :]
        return torch.cat([model.logits(rows).argmax(-1) for rows in last.to(model.dtype).split(_ROWS)])

    def count_supervised(self, batch: Batch) -> Tensor:
        """Two means: over the clean positions, and over the guesses."""
        text = NoisyText(batch, self.schedule)
        return torch.tensor([len(text.learned), text.num_guesses])

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """``ar_weight`` times the mean divergence from the target at clean positions, and the mean one at guesses. Step
        i of the metrics is the guess i + 1 places after its anchor. Raises UserError under ZeRO-3."""
        if any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
            wanted = "strategy=ddp, deepspeed_zero1 or deepspeed_zero2"
            raise UserError(f"the adapters of jacobi_forcing are called within the target: expected {wanted}")
        model = self.learning(target)
        text = self.noisy_text(batch, model)
        clean, guesses = _read(text, model).split([text.size, text.num_guesses])
        totals = [len(text.learned), text.num_guesses] if totals is None else totals
        steps = [Step(clean[text.learned], text.learned, self.ar_weight, total=totals[0])]
        places = text.steps or [(text.learned[:0], text.learned[:0])]
        steps += [Step(guesses[which], at, 1.0, total=totals[1]) for which, at in places]
        head = FrozenHead(lambda rows: target.logits(rows.to(target.dtype)), target.vocab_size)
        labels = batch.input_ids.flatten().roll(-1)
        teacher = Teacher(features.last.flatten(0, 1), target.logits, None, labels)
        loss, (kept, *results) = distillation_loss([head], teacher, steps, self.divergence)
        metrics = {"clean_loss_sum": kept.loss_sum, "clean_match_sum": kept.matched.sum()}
        count = torch.full((), len(text.learned), device=loss.device)
        metrics |= {"clean_loss_total": count, "clean_match_total": count}
        return TrainingLoss(loss, metrics | step_metrics(steps[1:], results))

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The whole target reads text and guesses, and, where guesses are its own, once more without a gradient."""
        assert self.target is not None
        sizes = target_sizes(self.target.model, self.target.config)
        reading = 2.0 * sizes.active + 2.0 * sizes.attention * sequence_length
        own = 2.0 * sum(parameter.numel() for parameter in self.parameters())
        passes = (1.0 + (self.own_guesses > 0)) * (1.0 + self.schedule.share)
        return passes * (reading + own), (1.0 + self.schedule.share) * (reading + 2.0 * own)

    def activation_bytes(self, tokens: int, element: int) -> float:
        """Of the target's layers, on text and guesses."""
        assert self.target is not None
        modules = self.target.decoder.modules()
        inputs = sum(module.in_features for module in modules if isinstance(module, torch.nn.Linear))
        return (1.0 + self.schedule.share) * 2 * inputs * tokens * element


def _read(text: NoisyText, model: LanguageModel) -> Tensor:
    """Last hidden states ``[R + M, H]``."""
    return model.masked_features(text.ids, text.positions, text.attend, text.visible).last[0]
