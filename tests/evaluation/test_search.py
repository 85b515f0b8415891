"""What an evaluation searches for the draft that pays most."""

import pytest

from specdraft.decoding.shapes import DynamicTree
from specdraft.errors import UserError
from specdraft.evaluation.search import Search

RIGHT = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.1, 0.1]]


def test_trees_of_the_most_likely_tokens_grow_where_the_draft_is_sure():
    search = Search(num_nodes=[16, 4, 16])
    assert search.trees(3, None) == [DynamicTree(4, 4, 4), DynamicTree(4, 8, 16)]
    assert search.trees(8, None) == [DynamicTree(8, 4, 4), DynamicTree(8, 8, 16)]
    assert Search().trees(3, None) == []


def test_trees_of_sampled_tokens_are_known_beforehand():
    trees = Search(num_nodes=[1, 4, 99]).trees(3, RIGHT)
    assert all(tree.sampled and not tree.is_chain for tree in trees)
    assert [tree.num_nodes for tree in trees] == [4, 39]  # of one node a chain is left; there are no more than 39


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0}, "decoding.shape.longest is 0: expected a whole number of at least 1"),
        ({"top_k": "many"}, "decoding.shape.top_k is many: expected a whole number of at least 1"),
        ({"num_nodes": [4, 0]}, r"decoding.shape.num_nodes is \[4, 0\]: expected whole numbers of at least 1"),
        ({"num_nodes": 8}, "decoding.shape.num_nodes is 8: expected whole numbers"),
        ({"num_nodes": "8"}, "decoding.shape.num_nodes is 8: expected whole numbers"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Search(**options)
