"""Medusa: the target's own opinion at the start, the names and the arithmetic that engines expect."""

import pytest
import torch

from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.medusa import Medusa
from specdraft.targets import Target
from tests.drafters.alone import Alone
from tests.families import FAMILIES, LENGTH, V


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, V, 3)], ids=["whole", "pruned"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "cohere"])
def test_an_untrained_head_says_what_the_target_says(family, vocabulary):
    """With the target's logit scale: engines apply none to a head."""
    target = Target.from_model(FAMILIES[family].build())
    drafter = Medusa.for_target(target, vocabulary, num_heads=2, num_layers=2).double()
    ids = torch.arange(LENGTH)[None] % V
    last = target.features(ids, ids, ()).last[0]
    expected = target.logits(last)
    assert expected.std() > 0.05
    if vocabulary is not None:
        expected = expected[:, vocabulary]
    for head in range(2):
        logits = drafter.lm_heads[head](drafter.hidden(head, last, ids.T))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # the rows passed through fp32


def test_behind_a_soft_cap_an_untrained_head_ranks_as_the_target_does():
    target = Target.from_model(FAMILIES["gemma2"].build())
    drafter = Medusa.for_target(target).double()
    ids = torch.arange(LENGTH)[None] % V
    last = target.features(ids, ids, ()).last[0]
    ranked = drafter.lm_heads[0](drafter.hidden(0, last, ids.T)).argsort(-1)
    assert torch.equal(ranked, target.logits(last).argsort(-1))


def test_parameters_carry_the_names_and_shapes_of_vllm(target):
    def names(drafter):
        return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}

    expected = {
        **{f"blocks.{h}.layers.{x}.weight": (32, 32) for h in range(2) for x in range(3)},
        **{f"blocks.{h}.layers.{x}.bias": (32,) for h in range(2) for x in range(3)},
        **{f"lm_heads.{h}.weight": (97, 32) for h in range(2)},
    }
    assert names(Medusa.for_target(target, num_heads=2, num_layers=3)) == expected
    pruned = expected | {f"lm_heads.{h}.weight": (40, 32) for h in range(2)} | {"d2t": (40,), "t2d": (97,)}
    assert names(Medusa.for_target(target, torch.arange(40), num_heads=2, num_layers=3)) == pruned


def test_a_head_is_the_plain_formula(target):
    """x + SiLU(Wx + b) layer by layer, then the projection, as in engines."""
    torch.manual_seed(0)
    drafter = Medusa.for_target(target, num_heads=2, num_layers=2).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state, weights = Alone(drafter, 0), drafter.state_dict()
    last = torch.randn(1, 3, 32, dtype=torch.float64)
    features = target.features(torch.tensor([[1, 4, 5]]), torch.arange(3)[None], ())
    state.advance(torch.tensor([4, 5, 6]), features._replace(last=last))
    tokens = []
    for head in range(2):
        x = last[0, -1]
        for layer in range(2):
            z = weights[f"blocks.{head}.layers.{layer}.weight"] @ x + weights[f"blocks.{head}.layers.{layer}.bias"]
            x = x + z / (1 + torch.exp(-z))
        tokens.append(int((weights[f"lm_heads.{head}.weight"] @ x).argmax()))
    assert state.draft(StaticTree.chain(2)).tokens.tolist() == [tokens]


def test_heads_do_not_see_each_others_tokens(target):
    drafter = Medusa.for_target(target, num_heads=3).double()
    last = torch.randn(1, 32, dtype=torch.float64)
    one, other = (drafter.hidden(2, last, torch.full((1, 3), token)) for token in (1, 2))
    assert torch.equal(one, other)
