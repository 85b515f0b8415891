"""Checks that compute: the target answers some prompts, and the drafter predicts those answers in several ways.

Expected acceptance at step s is the mean of 1 - TV(p, q) over the positions that step s of the training-time test
predicts, true tokens before it. Where another reading of the same weights (neighboring layers, the other norm) predicts
the answers better for certain, that reading is the one the head was trained for, however small the difference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdraft.data.packing import pack
from specdraft.data.sources.base import Message
from specdraft.data.sources.prompts import Prompt, encode
from specdraft.data.tokenization.chat import Example
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.doctor.findings import Finding, fault, note, ok
from specdraft.doctor.loaded_drafter import LoadedDrafter, Serving, served_dtype
from specdraft.drafters.eagle import Eagle3
from specdraft.errors import UserError
from specdraft.evaluation.bootstrap import bootstrap_interval
from specdraft.export.layout import DTYPES
from specdraft.targets.batch import Batch

_SURE = 0.99  # confidence with which another reading must be better to be believed
_WORSE = 0.85  # acceptance below this share of what it was is a fault
_COVERED = 0.9


@dataclass(frozen=True)
class Answers:
    """What the target said: ``batches`` of one prompt each, answers supervised; ``tokens [n]``, ids of all answers."""

    batches: list[Batch]
    tokens: Tensor

    @classmethod
    def of(cls, loaded: LoadedDrafter, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> "Answers":
        """The target's greedy answers."""
        target = loaded.target
        said = [g.tokens for g in Decoder(target).generate_batch(prompts, max_new_tokens, batch_size=8)]
        batches = []
        for prompt, answer in zip(prompts, said, strict=True):
            mask = [False] * len(prompt) + [True] * len(answer)
            batches.append(pack([Example([*prompt, *answer], mask)], len(mask))[0].to(target.device))
        return cls(batches, torch.tensor([token for answer in said for token in answer]))


def check_by_computing(
    loaded: LoadedDrafter, serving: Serving, prompts: Sequence[Prompt], max_new_tokens: int
) -> Iterator[Finding]:
    """A finding per check that applies to this kind of drafter. Raises UserError if no prompt fits the context."""
    if not loaded.target.tokenizer.chat_template and (
        serving.system_prompt or any(len(prompt.opening) > 1 for prompt in prompts)
    ):
        yield fault(
            "prompts",
            "they are conversations, and the target's tokenizer has no chat template: expected one to write them "
            "with; add a chat_template.jinja to the target's directory",
        )
        return
    answers = Answers.of(loaded, _ids(loaded, prompts, None, max_new_tokens), max_new_tokens)
    drafter = loaded.drafter
    if isinstance(drafter, Eagle3):
        with _unrolled(drafter):
            own, second = acceptance(loaded, answers), acceptance(loaded, answers, step=1)
            if unjudged := _unjudged("answers", answers, torch.cat([own, second], dim=1)):
                yield unjudged
                return
            yield _layers(drafter, loaded, answers, own)
            yield _norm(drafter, loaded, answers, second)
            yield _rounding(drafter, loaded, answers, own, serving)
            if serving.system_prompt:
                with_system = _ids(loaded, prompts, serving.system_prompt, max_new_tokens)
                yield _system_prompt(loaded, Answers.of(loaded, with_system, max_new_tokens), own)
        yield _coverage(drafter, loaded, answers)
    yield _decoded(loaded, _ids(loaded, prompts, serving.system_prompt, max_new_tokens)[:8], max_new_tokens)


@torch.no_grad()
def acceptance(loaded: LoadedDrafter, answers: Answers, step: int = 0, layers: Sequence[int] | None = None) -> Tensor:
    """Expected acceptance at a step, reading these layers of the target (None: the drafter's own).

    Sums and numbers of positions of each prompt, ``[P, 2]``.
    """
    target = loaded.target
    read = tuple(loaded.drafter.layers) if layers is None else tuple(layers)
    sums = []
    for batch in answers.batches:
        features = target.features(batch.input_ids, batch.position_ids, read)
        metrics = loaded.drafter.training_loss(batch, features, target).metrics
        sums.append([float(metrics[f"step_{step}/{name}"]) for name in ("alpha_sum", "row_total")])
    return torch.tensor(sums, dtype=torch.float64)


def mean(sums: Tensor) -> Tensor:
    """From sums and counts in the last two columns, ``[..., 2] -> [...]``."""
    return sums[..., 0] / sums[..., 1]


def better(other: Tensor, own: Tensor) -> bool:
    """Whether one reading predicts the answers better than another for certain: a bootstrap over prompts, paired."""
    both = torch.cat([other, own], dim=1)  # [P, 4]
    interval = bootstrap_interval(both, lambda s: mean(s[:, :2]) - mean(s[:, 2:]), _SURE)
    return interval is not None and interval[0] > 0


def _ids(loaded: LoadedDrafter, prompts: Sequence[Prompt], system: str | None, room: int) -> list[list[int]]:
    before: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
    rendered = [encode(loaded.target.tokenizer, [*before, *prompt.opening]) for prompt in prompts]
    fitting = [ids for ids in rendered if len(ids) + room <= loaded.target.max_length]
    if not fitting:
        raise UserError(
            f"none of the {len(prompts)} prompts leaves room for {room} tokens in the target's context of "
            f"{loaded.target.max_length}: lower max_new_tokens or give shorter prompts with traffic="
        )
    return fitting


@contextmanager
def _unrolled(head: Eagle3, steps: int = 2) -> Iterator[None]:
    """As many steps of the training-time test, whatever the head was trained with."""
    before, head.ttt_steps = head.ttt_steps, steps
    try:
        yield
    finally:
        head.ttt_steps = before


def _unjudged(check: str, answers: Answers, sums: Tensor) -> Finding | None:
    """The finding that there is nothing to judge by, if so. ``sums``: of the steps, ``[P, 2 * steps]``."""
    total = sums.sum(0).unflatten(0, (-1, 2))
    if bool((total[:, 1] == 0).any()):
        return note(
            check,
            f"the target said too little to judge by, {len(answers.tokens)} tokens to {len(answers.batches)} prompts: "
            "give traffic=... with prompts that it answers at length, or a larger max_new_tokens",
        )
    if not bool(total.isfinite().all()):
        return fault(
            check,
            "the head's predictions are not finite, so that nothing can be judged by them: expected finite hidden "
            "states and weights; give target.dtype=float32, or take the head from a sound checkpoint",
        )
    return None


def _layers(head: Eagle3, loaded: LoadedDrafter, answers: Answers, own: Tensor) -> Finding:
    last = loaded.target.num_layers
    neighbors = [[k + d for k in head.layers] for d in (-1, 1)]
    read = [layers for layers in neighbors if layers[0] > 0 and layers[-1] <= last]
    found = [acceptance(loaded, answers, layers=layers) for layers in read]
    for layers, other in zip(read, found, strict=True):
        if better(other, own):
            return fault(
                "layers",
                f"reading the hidden states after {layers} layers instead of {list(head.layers)}, the head predicts "
                f"{_mean(other)} of the target's tokens instead of {_mean(own)}: expected the layers of its training; "
                "the numbers are off by one, correct eagle_aux_hidden_state_layer_ids",
            )
    beside = " and ".join(map(_mean, found))
    return ok("layers", f"expected acceptance {_mean(own)}; by one layer off {beside}")


def _norm(head: Eagle3, loaded: LoadedDrafter, answers: Answers, own: Tensor) -> Finding:
    head.norm_output = not head.norm_output
    try:
        other = acceptance(loaded, answers, step=1)
    finally:
        head.norm_output = not head.norm_output
    if better(other, own):
        return fault(
            "norm",
            f"with norm_output={str(not head.norm_output).lower()} the second token would be accepted with "
            f"{_mean(other)} instead of {_mean(own)}: expected the norm of its training; correct norm_output",
        )
    return ok("norm", f"second token {_mean(own)}; with the other norm_output {_mean(other)}")


def _rounding(head: Eagle3, loaded: LoadedDrafter, answers: Answers, own: Tensor, serving: Serving) -> Finding:
    """Weights as the serving dtype holds them; the arithmetic itself stays the target's."""
    wanted = DTYPES[served_dtype(loaded, serving)]
    kept = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(wanted))
        rounded = acceptance(loaded, answers)
        for name, parameter in head.named_parameters():
            parameter.copy_(kept[name])
    name = str(wanted).removeprefix("torch.")
    if not mean(rounded.sum(0)) >= mean(own.sum(0)) * _WORSE:
        return fault(
            "rounding",
            f"weights rounded to {name} predict {_mean(rounded)} of the target's tokens instead of {_mean(own)}: "
            "expected no difference to speak of; serve the head in a wider dtype",
        )
    return ok("rounding", f"in {name} {_mean(rounded)}, unrounded {_mean(own)}")


def _system_prompt(loaded: LoadedDrafter, answers: Answers, own: Tensor) -> Finding:
    found = acceptance(loaded, answers)
    if unjudged := _unjudged("system prompt", answers, found):
        return unjudged
    if mean(found.sum(0)) < mean(own.sum(0)) * _WORSE:
        return fault(
            "system prompt",
            f"under the served system prompt expected acceptance is {_mean(found)}, without it {_mean(own)}: expected "
            "no difference to speak of; train on conversations that begin with it",
        )
    return ok("system prompt", f"expected acceptance {_mean(found)} with it, {_mean(own)} without")


def _coverage(head: Eagle3, loaded: LoadedDrafter, answers: Answers) -> Finding:
    covered = float(torch.isin(answers.tokens, head.draft_ids.cpu()).float().mean())
    trained = loaded.training("train_coverage")
    beside = "" if trained is None else f" (in training {trained:.1%})"
    if covered < _COVERED:
        return fault(
            "draft vocabulary",
            f"it holds {covered:.1%} of what the target says here{beside}: expected at least {_COVERED:.0%}; "
            "train with a larger model.draft_vocab_size, on this traffic",
        )
    return ok("draft vocabulary", f"it holds {covered:.1%} of what the target says here{beside}")


def _decoded(loaded: LoadedDrafter, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Finding:
    recorded: Any = loaded.recorded.get("extra", {})
    depth = recorded.get("decoding", {}).get("num_draft_tokens", 5)
    generations = Decoder(loaded.target, loaded.drafter, depth).generate_batch(prompts, max_new_tokens, 8)
    counts = AcceptanceCounts(depth)
    for generation in generations:
        counts.add(generation)
    length = counts.acceptance_length if counts.rounds else 1.0
    live = recorded.get("training", {}).get("live_acceptance_length")
    beside = "" if live is None else f"; while training, on its own held-out prompts, {live:.2f}"
    return note("decoding", f"acceptance length {length:.2f} really decoded, K = {depth}, greedy{beside}")


def _mean(sums: Tensor) -> str:
    return f"{mean(sums.sum(0)):.3f}"
