"""A training step of a drafter, as the training does it, and what it compares with the target.

B = sequences, T = tokens of one, R = B*T positions, Vd / V = draft / target vocabulary."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter, TrainingLoss
from specdraft.losses.chunked import FrozenHead, Head, Step, Teacher, watched
from specdraft.targets import Target
from specdraft.targets.batch import Batch

Rows = dict[tuple[int, int], Tensor]
"""By (step, flat position of the last token read) the distribution ``[V]`` that is compared with the target's there."""


def packed(documents: Sequence[Sequence[Sequence[int]]], learned: Sequence[Sequence[Sequence[bool]]]) -> Batch:
    """Sequences of documents, padded; ``learned`` says of every token whether it is to be learned."""
    length = max(sum(map(len, sequence)) for sequence in documents)
    rows: list[list[list[int]]] = []
    for sequence, masks in zip(documents, learned, strict=True):
        padding = length - sum(map(len, sequence))
        tokens = [token for document in sequence for token in document] + [0] * padding
        positions = [place for document in sequence for place in range(len(document))] + list(range(padding))
        numbers = [number for number, document in enumerate(sequence) for _ in document] + [-1] * padding
        mask = [int(each) for part in masks for each in part] + [0] * padding
        rows.append([tokens, positions, numbers, mask])
    parts = torch.tensor(rows)
    return Batch(parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3].bool())


def text(length: int, vocab_size: int, seed: int) -> list[int]:
    """Random tokens."""
    found: list[int] = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def step(drafter: Drafter, batch: Batch, target: Target, seed: int = 0, prepare: bool = True) -> TrainingLoss:
    """The loss of a batch, by the calls of the training in their order. ``prepare``: the drafter may put text of its
    own into the batch and disturb features first, by chance."""
    torch.manual_seed(seed)
    batch = batch.to(target.device)
    generator = torch.Generator(target.device).manual_seed(seed)
    if prepare:
        batch = drafter.prepare(batch, generator)
    with torch.no_grad():
        features = batch.features(target, drafter.layers, drafter.reads_every_last)
        if prepare:
            features = drafter.augment(features, generator)
    return drafter.training_loss(batch, features, target)


def compared(
    drafter: Drafter, batch: Batch, target: Target, wanted: set[tuple[int, int]] | None = None, tries: int = 24
) -> Rows:
    """What a step compares. A drafter may draw its positions by chance: steps are repeated until all that are
    ``wanted`` were seen, or ``tries`` are done; None: until three in a row bring nothing new. Empty where the loss is
    not made by ``distillation_loss``."""
    rows: Rows = {}

    def look(heads: Sequence[Head], teacher: Teacher, steps: Sequence[Step]) -> None:
        for number, each in enumerate(steps):
            logits = sum(_project(heads[head], hidden) for hidden, head in each.terms)
            assert isinstance(logits, Tensor)
            q = logits.detach().softmax(-1)
            if teacher.draft_ids is not None:
                q = q.new_zeros(len(q), target.vocab_size).index_copy_(-1, teacher.draft_ids, q)
            for place, row in zip(each.positions.tolist(), q.cpu(), strict=True):
                rows.setdefault((number, place), row)

    idle = 0
    for seed in range(tries):
        before = len(rows)
        with torch.no_grad(), watched(look):
            step(drafter, batch, target, seed, prepare=False)
        idle = 0 if len(rows) > before else idle + 1
        if idle == 3 if wanted is None else wanted <= rows.keys():
            break
    return rows


def _project(head: Head, hidden: Tensor) -> Tensor:
    return head.logits(hidden) if isinstance(head, FrozenHead) else hidden.to(head.dtype) @ head.T


def gradients(drafter: Drafter, loss: Tensor) -> Mapping[str, Tensor | None]:
    """Of every trained parameter its gradient, which is not kept."""
    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    drafter.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: parameter.grad for name, parameter in trained.items()}
    drafter.zero_grad(set_to_none=True)
    return found
