"""The same seed, the same drafter, the same numbers."""

import random

import numpy
import torch

from specdraft.check.gradients import usual_batch
from specdraft.check.outcome import Failed
from specdraft.check.rounds import Draft, Recording, compare
from specdraft.check.subject import Subject
from specdraft.check.training import step


def repeats_itself(subject: Subject) -> str:
    """Built, trained a step and drafted with twice, while every other generator of chance stands elsewhere. A
    difference is a run that cannot be repeated or resumed, and a request whose answer depends on those before it."""
    one, other = subject.plain().state_dict(), subject.plain().state_dict()
    if name := next((name for name in one if not torch.equal(one[name], other[name])), None):
        raise Failed(
            f"{name} begins otherwise each time under one seed: expected the same; draw from torch's generator"
        )
    drafter = subject.drafter()
    target, losses, drafts = subject.decoding_target(drafter), list[float](), list[list[list[Draft]]]()
    for turn in range(2):
        _elsewhere(turn)
        losses.append(float(step(subject.drafter().train(), usual_batch(subject), subject.target).loss.detach()))
        _elsewhere(turn + 5)
        drafts.append(Recording(drafter.eval(), target).run(subject.prompts[:2], 8))
    if losses[0] != losses[1]:
        says = f"under one seed a batch's loss is {losses[0]:.9g}, then {losses[1]:.9g}"
        raise Failed(f"{says}: expected the same; draw from torch's generator, which is seeded for every step")
    if said := compare(drafts[0], drafts[1], subject.close):
        raise Failed(
            f"a request is drafted for otherwise the second time ({said}): expected the draws of `chance` alone"
        )
    return "built, trained a step and drafted with twice"


def _elsewhere(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
