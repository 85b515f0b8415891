"""What every drafter has: its constructor's arguments, and one request as a batch of one."""

import json
from types import MappingProxyType

import torch

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.tree import DraftTree
from specdraft.drafters.base import BatchDrafter, constructor_arguments


class Constant(BatchDrafter):
    """Drafts one token over and over."""

    def __init__(self, token, options=None, layers=()):
        arguments = constructor_arguments(locals())
        super().__init__()
        self._arguments = arguments
        self.token = token

    def start(self, first_token, max_length):
        return None

    def advance(self, state, tokens, features):
        pass

    def draft_batch(self, states, shapes, sampling, generators):
        return [DraftTree.chain(torch.full((shape.depth,), self.token)) for shape in shapes]


class Shared(Constant):
    def __init__(self, name, **shared):
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        self._arguments |= arguments


def test_the_arguments_are_those_of_all_constructors_as_json_has_them():
    drafter = Shared("x", token=3, options=MappingProxyType({"beta": 0.5}), layers=(1, 2))
    expected = {"name": "x", "token": 3, "options": {"beta": 0.5}, "layers": [1, 2]}
    assert drafter.config() == expected == json.loads(json.dumps(drafter.config()))
    assert Shared(**drafter.config()).config() == expected
    drafter.config()["layers"].append(3)
    assert drafter.config() == expected


def test_one_request_is_a_batch_of_one():
    tree = Constant(7).draft(None, StaticTree.chain(3), Sampling(), None)
    assert tree.tokens.tolist() == [7, 7, 7] and tree.is_chain


def test_features_are_left_alone_unless_a_drafter_says_otherwise():
    features = object()
    assert Constant(7).augment(features, torch.Generator()) is features
