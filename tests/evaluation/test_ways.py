"""Ways of drafting: every drafter in the first drafting, in others those that it makes a difference to."""

from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.evaluation.ways import ways_of


def test_a_way_for_each_drafter_and_drafting(target):
    drafters = {"medusa": Medusa.for_target(target, num_heads=2), "lookup": PromptLookup()}
    ways = list(ways_of(drafters, StaticTree.chain(2), ("greedy", "sampled")))
    assert [(way.name, way.drafting, way.beside) for way in ways] == [
        ("medusa", "greedy", False),
        ("lookup", "greedy", False),
        ("medusa", "sampled", True),
    ]
    trees = list(ways_of(drafters, DynamicTree(2, 2, 4), ("greedy", "sampled")))
    assert [(way.name, way.drafting, way.beside) for way in trees] == [
        ("medusa", "greedy", False),
        ("lookup", "greedy", False),
    ]
