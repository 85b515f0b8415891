"""What learns: every parameter that is to, and nothing else."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdraft.check.outcome import Failed, NotApplicable
from specdraft.check.subject import Subject
from specdraft.check.training import gradients, packed, step, text
from specdraft.onednn import plain
from specdraft.targets.batch import Batch


def usual_batch(subject: Subject) -> Batch:
    """Prompts with answers to be learned, packed."""
    size = subject.target.vocab_size
    documents = [[text(20, size, 1), text(14, size, 2)], [text(31, size, 3)]]
    masks = [[[place >= 4 for place in range(len(document))] for document in sequence] for sequence in documents]
    return packed(documents, masks)


def every_parameter_learns(subject: Subject) -> str:
    """A step's gradients. A parameter without one stays as it began and is served so; on several GPUs the run stops."""
    drafter = subject.drafter().train()
    frozen = [name for name, parameter in drafter.named_parameters() if not parameter.requires_grad]
    found = gradients(drafter, step(drafter, usual_batch(subject), subject.target).loss)
    if not found:
        raise NotApplicable("it has no parameter to train")
    if name := _first(found, lambda gradient: gradient is None or not bool(gradient.abs().sum() > 0)):
        mend = "use it in training_loss, or freeze it with requires_grad_(False)"
        raise Failed(f"no gradient reaches {name}: expected one for every trained parameter; {mend}")
    if name := _first(found, lambda gradient: gradient is not None and not bool(gradient.isfinite().all())):
        raise Failed(f"the gradient of {name} is not finite: expected numbers; look for a division by what may be zero")
    left = f", {len(frozen)} are frozen" if frozen else ""
    return f"all {len(found)} trained parameters have a gradient{left}"


def target_is_left_alone(subject: Subject) -> str:
    """The target before and after a step of the optimizer. Where it changes, the drafter learns to draft for a target
    that nobody serves; where it is part of the drafter, it is saved with every checkpoint."""
    target = subject.target
    before = {name: plain(value).clone() for name, value in target.model.state_dict().items()}
    drafter = subject.drafter().train()
    own = {_place(parameter): name for name, parameter in target.model.named_parameters()}
    for name, parameter in drafter.named_parameters():
        if shared := own.get(_place(parameter)):
            mend = "read it through self.target, or copy it with .clone()"
            raise Failed(
                f"{name} is the target's own {shared}: expected a drafter without weights of the target; {mend}"
            )
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    if not parameters:
        raise NotApplicable("it has no parameter to train")
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step(drafter, usual_batch(subject), target).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    grown = [name for name, parameter in target.model.named_parameters() if parameter.requires_grad]
    learned = [name for name, parameter in target.model.named_parameters() if parameter.grad is not None]
    after = target.model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, plain(after[name]))]
    if wrong := [*changed, *learned, *grown]:
        with torch.no_grad():  # the other checks ask the same target
            for name in changed:
                after[name].copy_(before[name])
        target.model.requires_grad_(False)
        for parameter in target.model.parameters():
            parameter.grad = None
        how = "changes in" if changed else "is trained by"
        raise Failed(
            f"the target's {wrong[0]} {how} a training step: expected a frozen target; detach what is read of it"
        )
    return f"{len(before)} tensors of the target as they were after an optimizer's step"


def _first(gradients: Mapping[str, Tensor | None], wrong: Callable[[Tensor | None], bool]) -> str | None:
    return next((name for name, gradient in gradients.items() if wrong(gradient)), None)


def _place(parameter: Tensor) -> int:
    """Where its numbers lie; one that is packed for a processor has no place that could be told."""
    return id(parameter) if parameter.is_mkldnn else parameter.untyped_storage().data_ptr()
