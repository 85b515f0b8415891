"""What the unrolled steps wait for."""

from types import SimpleNamespace

import pytest
import torch

from specdraft.drafters.alignment import align
from specdraft.drafters.eagle import Eagle, Eagle3


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_the_device_is_read_once_for_all_steps(kind, target, packed, monkeypatch):
    """The meta device has nothing to read: whatever asks it raises."""
    head = kind.for_target(target, ttt_steps=3).to("meta")
    head.bind(SimpleNamespace(embedding_weight=target.embedding_weight.to("meta"), sliding_window=None))
    read = []

    def cpu(given):
        read.append(given)
        return torch.stack([packed.document_ids, packed.loss_mask, packed.position_ids]).flatten(1)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    alignment = align(packed.to("meta"), 3)
    steps = head._unroll(
        alignment, torch.zeros(packed.input_ids.numel(), target.hidden_size, device="meta"), head.decay
    )
    assert [len(step.hidden) for step in steps] == align(packed, 3).counts
    sum(step.hidden.sum() for step in steps).backward()
    assert len(read) == 2  # one of them was for the counts
