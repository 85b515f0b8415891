"""A trace must tell what was decoded: its tokens are the generation's, its counts the generation's."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import Verdict
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.trace import Round
from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.targets import Target
from tests.fakes import tiny_llama


def test_a_tree_shows_the_accepted_path_and_where_it_would_have_gone():
    #      ROOT -> 10 -> 12        node 1 (token 11) is the second choice; its first child is node 3 (13), then 5 (15)
    #           -> 11 -> 13 -> 15
    #                 -> 14
    tree = DraftTree(torch.tensor([10, 11, 12, 13, 14, 15]), torch.tensor([ROOT, ROOT, 0, 1, 1, 3]))
    assert Round.of(tree, Verdict((1,), 99)) == Round([11, 13, 15], 1, 99)
    assert Round.of(tree, Verdict((1, 4), 99)) == Round([11, 14], 2, 99)
    assert Round.of(tree, Verdict((), 99)) == Round([10, 12], 0, 99)
    assert Round.of(DraftTree.empty(), Verdict((), 7)) == Round([], 0, 7)


@pytest.mark.parametrize("shape", [3, StaticTree(((0,), (1,), (0, 0), (1, 0)))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_is_the_generation(shape, temperature):
    target = Target.from_model(tiny_llama())
    decoder = Decoder(target, PromptLookup(), shape, Sampling(temperature), trace=True)
    results = decoder.generate_batch([[5, 6, 7, 5, 6], [9, 9, 9]], 20, batch_size=2)
    for prompt, result in zip([[5, 6, 7, 5, 6], [9, 9, 9]], results, strict=True):
        trace = result.trace
        assert trace.prompt == prompt
        assert trace.tokens[: len(result.tokens)] == result.tokens and len(result.tokens) == 20
        assert [each.accepted for each in trace.rounds] == result.accepted
        assert all(len(each.drafted) >= each.accepted for each in trace.rounds)
    assert Decoder(target).generate([1, 2], 4).trace is None
