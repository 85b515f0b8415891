"""What a training step may see: a token's own document, up to that token, wherever the document lies."""

import torch

from specdraft.check.outcome import Failed
from specdraft.check.subject import Subject
from specdraft.check.training import compared, packed, step, text
from specdraft.drafters.base import Drafter
from specdraft.targets.batch import Batch

_HIDDEN = "expected no look at what comes behind; step s at r reads tokens up to r + 1 + s and the feature at r"
_LENGTHS = ((14, 19), (24,))  # of the documents of two packed sequences


def documents_are_apart(subject: Subject) -> str:
    """The loss of one document while the others, and the padding, are replaced. Where it changes, a document learns
    from its neighbors, which it will not have in serving."""
    drafter = subject.drafter().train()
    checked = 0
    for row, sequence in enumerate(_LENGTHS):
        for number in range(len(sequence)):
            losses = [_loss(subject, drafter, _alone(subject, (row, number), other)) for other in (0, 100)]
            if abs(losses[0] - losses[1]) > 1e-6 * max(1.0, abs(losses[0])):
                says = (
                    f"the loss of a document is {losses[0]:.6g} beside some documents and {losses[1]:.6g} beside others"
                )
                mend = "expected it to see its own alone; use `align`, whose documents say where each begins"
                raise Failed(f"{says}: {mend}")
            checked += 1
    return f"{checked} packed documents, each with other neighbors and other padding"


def the_future_is_hidden(subject: Subject) -> str:
    """What is compared with the target at the first tokens of a document, while those behind are replaced. Where it
    changes, training is shown what it is to predict: its loss falls fast, and in serving nothing is accepted."""
    drafter, size, checked = subject.drafter(), subject.target.vocab_size, 0
    for same in (9, 14):
        texts = [text(same, size, 5) + text(14, size, seed) for seed in (1, 2)]
        batches = [packed([[ids]], [[[place >= 2 for place in range(len(ids))]]]) for ids in texts]
        one, other = (compared(drafter, batch, subject.target) for batch in batches)
        early = sorted(key for key in one.keys() & other.keys() if key[1] < same)
        for step_number, place in early:
            gap = (one[step_number, place] - other[step_number, place]).abs().max().item()
            if gap > subject.close:
                says = f"step {step_number} at token {place} says something else (by {gap:.2g}) if token {same} changes"
                raise Failed(f"{says}: {_HIDDEN}")
        checked += len(early)
        if not one:
            _loss_of_what_comes_before(subject, drafter, texts, same)
    return f"{checked} distributions before two texts" if checked else "the loss before two texts"


def _loss_of_what_comes_before(subject: Subject, drafter: Drafter, texts: list[list[int]], same: int) -> None:
    """Where the logits are not seen: at least what lies behind all that is learned must not count. Raises Failed."""
    masks = [[[2 <= place < same for place in range(len(ids))]] for ids in texts]
    losses = [_loss(subject, drafter, packed([[ids]], [mask])) for ids, mask in zip(texts, masks, strict=True)]
    if abs(losses[0] - losses[1]) > 1e-6 * max(1.0, abs(losses[0])):
        says = f"the loss of {same} tokens is {losses[0]:.6g} before one text and {losses[1]:.6g} before another"
        raise Failed(f"{says}: {_HIDDEN}")


def places_do_not_matter(subject: Subject) -> str:
    """A document alone, and behind another in a packed sequence: what is compared with the target is the same. A
    difference is a position counted from the batch's start, and a drafter that works where a text begins only."""
    drafter = subject.drafter()
    ids = text(19, subject.target.vocab_size, 7)
    before = text(14, subject.target.vocab_size, 8)
    mask = [place >= 3 for place in range(len(ids))]
    alone = packed([[ids]], [[mask]])
    behind = packed([[before, ids]], [[[False] * len(before), mask]])
    one, other = (compared(drafter, batch, subject.target) for batch in (alone, behind))
    moved = {(number, place + len(before)): row for (number, place), row in one.items()}
    if not one:
        losses = [_loss(subject, drafter, batch) for batch in (alone, behind)]
        if abs(losses[0] - losses[1]) > 10 * subject.close * max(1.0, abs(losses[0])):
            raise Failed(_moved(f"the loss of a document is {losses[0]:.6g} alone and {losses[1]:.6g} behind another"))
        return "the loss of a document alone and behind another"
    common = moved.keys() & other.keys()
    if not common or (len(common) < len(moved) and len(moved) == len(other)):
        raise Failed(_moved("a document behind another is learned at other positions than alone"))
    for key in sorted(common):
        if (gap := (moved[key] - other[key]).abs().max().item()) > 5 * subject.close:
            raise Failed(_moved(f"behind another document, step {key[0]} compares other probabilities (by {gap:.2g})"))
    return f"{len(common)} distributions of a document alone and behind another"


def _moved(says: str) -> str:
    return f"{says}: expected the same; take positions from batch.position_ids, which begin at 0 with every document"


def _loss(subject: Subject, drafter: Drafter, batch: Batch) -> float:
    with torch.no_grad():
        return float(step(drafter, batch, subject.target, seed=3).loss)


def _alone(subject: Subject, learned: tuple[int, int], other: int) -> Batch:
    """The packed documents, of which one is to be learned; the rest changes with ``other``."""
    documents, masks = list[list[list[int]]](), list[list[list[bool]]]()
    for row, sequence in enumerate(_LENGTHS):
        documents.append([])
        masks.append([])
        for number, length in enumerate(sequence):
            own = (row, number) == learned
            documents[-1].append(text(length, subject.target.vocab_size, 10 * row + number + (0 if own else other)))
            masks[-1].append([own and place >= 3 for place in range(length)])
    batch = packed(documents, masks)
    batch.input_ids[batch.document_ids < 0] = 1 if other else 0
    return batch
