"""Live acceptance: while training, really decode held-out prompts with the current head, and keep the best one.

Acceptance words are those of ``specdraft.decoding.metrics``. Prompts are dealt out over the ranks; the counts are
summed, then divided once. Times are the first rank's own."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from specdraft.data.datamodule import DataModule
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation
from specdraft.decoding.metrics import AcceptanceCounts, acceptance_length_error, cost_ratio, predicted_speedup
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import Published, sampling_at, shaped
from specdraft.decoding.shapes import draft_tokens
from specdraft.decoding.trace import Trace
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import read_config, save_drafter
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import UserError
from specdraft.evaluation.tuning import Answers, Distance
from specdraft.text import fingerprint
from specdraft.training.callbacks import find_callback
from specdraft.training.callbacks.stop_signal import StopSignal
from specdraft.training.checkpoints.consolidated import full_precision_drafter
from specdraft.training.module import DrafterModule

_SAMPLES = 4  # answers shown with their drafts; more would not be read


@dataclass
class Measurement:
    """What one measurement found. Seconds are this rank's: of drafting, of its rounds without that, and of as many
    ``steps`` of the target alone, decoding plainly."""

    counts: AcceptanceCounts
    by_category: dict[str, AcceptanceCounts]
    by_prompt: list[tuple[int, int]] = field(default_factory=list)  # accepted tokens and rounds
    rounds: int = 0
    draft_seconds: float = 0.0
    verification_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    samples: list[tuple[str, Trace, int]] = field(default_factory=list)
    distance: Distance | None = None  # of a tuned target

    def add(self, category: str, generation: Generation) -> None:
        """Count a generation of this rank."""
        self.counts.add(generation)
        self.by_category[category].add(generation)
        self.by_prompt.append((sum(generation.accepted), len(generation.accepted)))
        self.rounds += len(generation.accepted)
        self.draft_seconds += generation.draft_seconds
        self.verification_seconds += generation.decode_seconds - generation.draft_seconds
        if generation.trace is not None:
            self.samples.append((category, generation.trace, len(generation.tokens)))

    def costs(self) -> dict[str, float]:
        """In plain target steps: a drafted token (cost_ratio c), a round without its drafting (verification_cost_ratio
        v); predicted_speedup = acceptance length / (v + K c), of the rounds alone. Empty where nothing was decoded."""
        if not (self.rounds and self.steps):
            return {}
        step, drafts = self.step_seconds / self.steps, self.rounds * self.counts.num_draft_tokens
        draft, verify = self.draft_seconds / self.rounds, self.verification_seconds / self.rounds
        return {
            "cost_ratio": cost_ratio(self.draft_seconds, drafts, step),
            "verification_cost_ratio": verify / step,
            "predicted_speedup": predicted_speedup(self.counts.acceptance_length, draft, verify, step),
        }


class LiveAcceptance(Callback):
    """Measure acceptance every ``every_n_steps`` optimizer steps and after the last one. The best head so far, by
    acceptance length, lies in ``directory`` at any time after the first measurement."""

    def __init__(
        self,
        prompts: int | Sequence[Sequence[int]],
        directory: str | Path,
        every_n_steps: int = 100,
        num_draft_tokens: int | str = 5,
        sampling: Sampling | Callable[[Published], Sampling] | None = None,
        max_new_tokens: int = 64,
    ) -> None:
        """``prompts``: token ids, or how many of the data's for validation; ``sampling``: or from the target."""
        self.prompts: Sequence[Sequence[int]] = () if isinstance(prompts, int) else prompts
        self.num_prompts = prompts if isinstance(prompts, int) else None
        self.categories = [""] * len(self.prompts)  # of each prompt; acceptance is counted by them as well
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.num_draft_tokens = draft_tokens(num_draft_tokens)
        self.sampling = sampling if isinstance(sampling, Sampling) else Sampling()
        self._sampling_of = None if isinstance(sampling, Sampling) else sampling
        self.max_new_tokens = max_new_tokens
        self.truncates_drafts: bool | None = None  # of the engine; None: as ``sampling`` says
        self.best: float | None = None
        self.best_step = 0
        self.measured_step: int | None = None
        self.samples: list[tuple[str, Trace, int]] = []  # categories, traces and lengths of the last measurement
        self.counts = AcceptanceCounts(self.num_draft_tokens)  # of the last measurement
        self._answers: Answers | None = None  # of the target, where it is tuned
        self._stop = StopSignal()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the prompts from the data. Raises UserError where none leaves room for an answer, and as ``served``."""
        if self._sampling_of is not None:
            self.sampling = self._sampling_of(cast(DrafterModule, pl_module).target)
        if self.truncates_drafts is not None:
            self.sampling = self.sampling.drafting(truncates=self.truncates_drafts)
        self._stop = find_callback(trainer, StopSignal) or self._stop
        if self.num_prompts is not None:
            data: DataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's data connector
            found = data.evaluation_prompts("validation", self.num_prompts, self.max_new_tokens)
            self.categories, self.prompts = [category for category, _ in found], [ids for _, ids in found]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Measure when it is time."""
        step = trainer.global_step
        if step >= trainer.max_steps or (self.every_n_steps > 0 and step % self.every_n_steps == 0):
            self._measure_once(trainer, cast(DrafterModule, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run may end before ``trainer.max_steps``: after a time, say, or as another callback wishes."""
        if trainer.fit_loop.done:
            self._measure_once(trainer, cast(DrafterModule, pl_module))

    def _measure_once(self, trainer: Trainer, module: DrafterModule) -> None:
        if trainer.global_step not in (0, self.measured_step):
            module.stopwatch.pause()
            with module.activity.during("a live measurement"):
                self.measure(trainer, module)
            module.stopwatch.start()

    def measure(self, trainer: Trainer, module: DrafterModule) -> None:
        """Decode, log, and save the head if it is the best so far."""
        drafter = full_precision_drafter(trainer.strategy, module.drafter, module.target)
        start = time.perf_counter()
        measured = self._decode(trainer, module, drafter)
        if measured is None:
            return
        counts = self.counts = measured.counts
        step = self.measured_step = trainer.global_step
        length, self.samples = _length(counts), measured.samples
        values = {
            "acceptance_length": length,
            "acceptance_length_error": acceptance_length_error(measured.by_prompt),
            "draft_acceptance_rate": counts.draft_acceptance_rate,
            "live_acceptance_seconds": time.perf_counter() - start,
        } | measured.costs()
        if measured.distance is not None:
            values["target_greedy_agreement"] = measured.distance.greedy_agreement
            values["target_divergence"] = measured.distance.divergence
        for position, rate in enumerate(counts.conditional_acceptance_rate, start=1):
            values[f"conditional_acceptance_rate_{position}"] = rate
        if len(measured.by_category) > 1:
            for category, own in measured.by_category.items():
                values[f"acceptance_length_by_category/{category}"] = _length(own)
        module.publish({name: value for name, value in values.items() if not math.isnan(value)})
        if self.best is None or length > self.best:
            self.best, self.best_step = length, step
            if trainer.is_global_zero:
                training = {"step": step, "live_acceptance_length": self.best} | module.about.get("training", {})
                training["live_drafting"] = "greedy" if self.sampling.greedy else "sampled"
                save_drafter(drafter, self.directory, module.target.identity, module.about | {"training": training})

    def _decode(self, trainer: Trainer, module: DrafterModule, drafter: Drafter) -> Measurement | None:
        names = sorted(set(self.categories))
        by_category = {name: AcceptanceCounts(self.num_draft_tokens) for name in names}
        measured = Measurement(AcceptanceCounts(self.num_draft_tokens), by_category)
        training = drafter.training
        drafter.eval()
        target = drafter.tuned(module.target)
        # Autocast belongs to training: serving engines do not use it, so neither does the measurement.
        with torch.inference_mode(), torch.autocast(module.device.type, enabled=False), ready_to_decode(drafter):
            decoder = Decoder(target, drafter, self.num_draft_tokens, self.sampling)
            # A target that is cut over the ranks needs them all for every pass: they decode the same, side by side.
            together = module.target.engine is not None
            first, ranks = (0, 1) if together else (trainer.global_rank, trainer.world_size)
            for index in range(first, len(self.prompts), ranks):
                if self._stop.agreed(trainer) if together else self._stop.requested:
                    break
                decoder.trace = trainer.is_global_zero and len(measured.samples) < _SAMPLES
                generation = decoder.generate(self.prompts[index], self.max_new_tokens, seed=index)
                measured.add(self.categories[index], generation)
                if index == 0:  # in the midst of the others, so that a busy machine slows down both alike
                    plain = Decoder(target, sampling=self.sampling)
                    alone = plain.generate(self.prompts[index], self.max_new_tokens, seed=index)
                    measured.steps = len(alone.tokens) - 1  # a step emits one token, the prompt's pass the first
                    measured.step_seconds = alone.decode_seconds
        if drafter.tunes_target and trainer.is_global_zero:
            self._answers = self._answers or Answers(module.target, self.prompts, self.max_new_tokens)
            measured.distance = self._answers.distance(target)
        drafter.train(training)
        stopped = self._stop.agreed(trainer)
        if trainer.world_size > 1 and not together:
            measured.by_prompt = [pair for rank in module.gather(measured.by_prompt) for pair in rank]
            everywhere = module.gather(measured.by_category)
            measured.by_category = {name: reduce(add, [rank[name] for rank in everywhere]) for name in names}
            measured.counts = reduce(add, measured.by_category.values(), AcceptanceCounts(self.num_draft_tokens))
        return None if stopped else measured

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the best head and where it was."""
        best = {"best": self.best, "best_step": self.best_step}
        return best | {"measured_step": self.measured_step, "measures": self._measures()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue. A length measured otherwise is no rival of those to come, nor is one whose head is not there."""
        if state_dict.get("measures") != self._measures():
            reason = "was measured with other prompts or settings of decoding"
        elif state_dict["best"] is not None and not self._holds(state_dict["best"], state_dict["best_step"]):
            reason = "is not beside the checkpoint"
        else:
            self.best, self.best_step = state_dict["best"], state_dict["best_step"]
            self.measured_step = state_dict["measured_step"]
            return
        rank_zero_warn(f"the best head of the resumed run {reason}: the best from here on is kept")

    def _measures(self) -> dict[str, Any]:
        """All that a measured length depends on, besides the head."""
        prompts = fingerprint([list(ids) for ids in self.prompts])
        decoding = {"num_draft_tokens": self.num_draft_tokens, "max_new_tokens": self.max_new_tokens}
        # What came later counts where it is not neutral, so that older checkpoints are of the same measurement.
        neutral = asdict(Sampling())
        sampling = {name: value for name, value in asdict(self.sampling).items() if value != neutral[name]}
        older = {name: getattr(self.sampling, name) for name in ("temperature", "top_k", "top_p")}
        return {"prompts": prompts} | decoding | sampling | older

    def _holds(self, length: float, step: int) -> bool:
        try:
            training = read_config(self.directory)["extra"]["training"]
            return bool(training["step"] == step and training["live_acceptance_length"] == length)
        except (UserError, KeyError, TypeError):
            return False


def first_sampling(
    target: Published, temperature: float | str | Sequence[float | str], **given: float | None
) -> Sampling:
    """At the evaluation's first temperature; ``given``: what else shapes the distribution. Raises UserError."""
    first = temperature if isinstance(temperature, int | float | str) else temperature[0]
    return shaped(sampling_at(target, first), given)


def _length(counts: AcceptanceCounts) -> float:
    # Without a single round (every text ended with its first token) nothing was accepted either.
    return counts.acceptance_length if counts.rounds else 1.0
