"""Hydra: every head reads the tokens of its own path, through the target's embedding."""

import torch

from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.hydra import Hydra
from specdraft.targets import Features


def random_hydra(target, **options):
    torch.manual_seed(0)
    drafter = Hydra.for_target(target, **options).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return drafter


def test_a_head_is_the_plain_formula(target):
    """x + SiLU(W [x, embeddings of unit RMS] + b), then residual layers on x alone."""
    drafter = random_hydra(target, num_heads=3, num_layers=2)
    last, path = torch.randn(4, 32, dtype=torch.float64), torch.randint(97, (4, 3))
    unit = target.embedding_weight / (target.embedding_weight.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    first, second = drafter.blocks[2].layers
    assert first.weight.shape == (32, 4 * 32) and second.weight.shape == (32, 32)
    for row in range(4):
        read = torch.cat([last[row], *(unit[token] for token in path[row])])
        x = last[row]
        for layer, seen in ((first, read), (second, None)):
            z = layer.weight @ (x if seen is None else seen) + layer.bias
            x = x + z / (1 + torch.exp(-z))
        torch.testing.assert_close(drafter.hidden(2, last, path)[row], x, rtol=1e-10, atol=1e-10)


def test_every_token_of_the_path_matters(target):
    drafter = random_hydra(target, num_heads=3)
    last, path = torch.randn(1, 32, dtype=torch.float64), torch.tensor([[5, 6, 7]])
    plain = drafter.hidden(2, last, path)
    for place in range(3):
        other = path.clone()
        other[0, place] = 50
        assert not torch.allclose(drafter.hidden(2, last, other), plain)


def test_the_embedding_is_borrowed(target):
    drafter = Hydra.for_target(target, num_heads=2)
    parts = ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight")
    assert set(drafter.state_dict()) == {part.format(head) for part in parts for head in range(2)}


@torch.inference_mode()
def test_the_last_request_takes_the_row_of_one_that_ends(target):
    drafter = random_hydra(target, num_heads=3)
    drafting, one = drafter.drafting(3, 16), torch.ones(1, dtype=torch.int64)
    for row in range(3):
        features = Features(torch.zeros(1, 1, 0), torch.randn(1, 1, 32, dtype=torch.float64))
        drafting.advance(Texts(one, 1, row), torch.tensor([[row + 5]]), one, features)
    texts = Texts(one.expand(3), 1)
    chain = StaticTree.chain(3)
    first = drafting.first(texts)
    drafts = drafting.draft(texts, chain, Sampling(), None).tokens
    drafting.drop(0, 2, 1)
    texts = Texts(one.expand(2), 1)
    assert torch.equal(drafting.first(texts), first[[2, 1]]) and not torch.equal(first[0], first[2])
    assert torch.equal(drafting.draft(texts, chain, Sampling(), None).tokens, drafts[[2, 1]])
