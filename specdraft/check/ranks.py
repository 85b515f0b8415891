"""A drafter on many ranks: the same calls whatever each one's batch holds, and a loss that no cut changes."""

import torch
from torch import nn

from specdraft.check.gradients import usual_batch
from specdraft.check.outcome import Failed, NotApplicable
from specdraft.check.subject import Subject
from specdraft.check.training import packed, step, text
from specdraft.drafters.base import Drafter
from specdraft.targets import Target
from specdraft.targets.batch import Batch


def calls_of(drafter: Drafter, batch: Batch, target: Target) -> list[str]:
    """A training step's calls of modules as engines see them, and the order in which gradients are complete."""
    seen: list[str] = []
    names = {module: name for name, module in drafter.named_modules()}
    handles = []

    def before(module: nn.Module, _: object) -> None:
        seen.append(f"{names[module]} begins")

    def after(module: nn.Module, *_: object) -> None:
        seen.append(f"{names[module]} ends")

    for module in names:
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:

            def note(_: object, name: str = name) -> None:
                seen.append(f"gradient of {name}")

            handles.append(parameter.register_post_accumulate_grad_hook(note))
    features = batch.features(target, drafter.layers)
    seen.clear()
    drafter.training_loss(batch, features, target).loss.backward()
    for handle in handles:
        handle.remove()
    drafter.zero_grad(set_to_none=True)
    return seen


def ranks_call_alike(subject: Subject) -> str:
    """A step on batches long, short and with nothing to learn calls the same modules in the same order, and gives every
    parameter a gradient. Where it does not, several GPUs wait for each other for ever."""
    drafter, size = subject.drafter().train(), subject.target.vocab_size
    trained = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    if not trained:
        raise NotApplicable("it has no parameter to train")
    if drafter.tunes_target:
        raise NotApplicable("it tunes the target, which is refused where ranks share weights")
    batches = {"of many documents": usual_batch(subject)}
    for what, lengths, learned in (("of one long document", (40,), 20), ("with nothing to learn", (12, 9), 99)):
        documents = [[text(length, size, 4) for length in lengths]]
        batches[what] = packed(documents, [[[place >= learned for place in range(length)] for length in lengths]])
    batches["of short documents"] = packed([[text(6, size, 5)] * 4], [[[place >= 3 for place in range(6)]] * 4])
    first, expected = next(iter(batches)), None
    calls_of(drafter, batches[first].to(subject.target.device), subject.target)  # the first may prepare something
    for what, batch in batches.items():
        try:
            calls = calls_of(drafter, batch.to(subject.target.device), subject.target)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            calls = []
        if missing := next((name for name in trained if f"gradient of {name}" not in calls), None):
            mend = "read one position all the same, as `align` does, and take the mean over none as zero"
            raise Failed(f"in a batch {what}, {missing} has no gradient, not even of zeros: expected one; {mend}")
        expected = calls if expected is None else expected
        if calls != expected:
            says = f"a batch {what} calls other modules than one {first}, or in another order"
            raise Failed(f"{says}: expected the same calls whatever a batch holds; branch on nothing that a batch says")
    return f"{len(batches)} batches, one of them with nothing to learn"


def loss_is_shared_out(subject: Subject) -> str:
    """The loss of a batch, and the sum of its halves' losses with the counts of the whole. A difference makes the loss
    depend on how many GPUs there are and on how batches are accumulated."""
    drafter, batch = subject.drafter(), usual_batch(subject)
    learns = type(drafter).training_loss is not Drafter.training_loss
    if learns and drafter.tells_hits and step(drafter, batch, subject.target).drafted is None:
        mend = "hand on what `objective` tells, or set tells_hits = False in the class"
        raise Failed(f"the loss does not tell which first tokens of drafts are right (TrainingLoss.drafted): {mend}")
    counts = drafter.count_supervised(batch)
    if counts is None:
        raise NotApplicable("it has no count_supervised: batches count alike, however much there is to learn in each")
    with torch.no_grad():
        if step(drafter, batch, subject.target, 1).loss != step(drafter, batch, subject.target, 2).loss:
            raise NotApplicable("it draws by chance what it learns from: halves have other draws than the whole")
        losses = []
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
            part = Batch(*(getattr(batch, name)[rows] for name in Batch.__dataclass_fields__))
            features = part.features(subject.target, drafter.layers, drafter.reads_every_last)
            losses.append(float(drafter.training_loss(part, features, subject.target, counts.tolist()).loss))
    if abs(losses[0] - losses[1] - losses[2]) > 10 * subject.close * max(1.0, abs(losses[0])):
        says = f"the loss of a batch is {losses[0]:.6g} and those of its halves are {losses[1]:.6g} and {losses[2]:.6g}"
        raise Failed(f"{says}: expected their sum; hand step s `total=totals[s]`")
    return "a batch and its halves"
