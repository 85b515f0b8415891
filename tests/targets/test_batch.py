"""The packed batch: which positions come before a token to learn."""

import torch

from specdraft.targets.batch import Batch


def test_a_position_before_a_token_to_learn_is_of_the_same_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    learned = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 1]]).bool()
    batch = Batch(torch.zeros_like(documents), torch.arange(6).repeat(2, 1), documents, learned)
    # Token 3 begins a document, token 5 is padding, and nothing comes before a sequence's first token.
    assert batch.before_learned().int().tolist() == [[1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0]]


def test_it_moves_as_a_whole():
    batch = Batch(*(torch.zeros((1, 2), dtype=torch.int64) for _ in range(3)), torch.ones((1, 2), dtype=torch.bool))
    moved = batch.to("meta")
    assert all(getattr(moved, name).is_meta for name in Batch.__dataclass_fields__)
