"""What every drafter has: its constructor's arguments, and features that it may disturb."""

import json
from types import MappingProxyType

import pytest
import torch

from specdraft.drafters.base import Drafter, constructor_arguments
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.tli import TliDraft
from specdraft.errors import UserError
from specdraft.export.vllm import VLLM


class Constant(Drafter):
    """Has arguments, and nothing to draft with."""

    def __init__(self, token, options=None, layers=()):
        arguments = constructor_arguments(locals())
        super().__init__()
        self._arguments = arguments
        self.token = token

    def drafting(self, rows, capacity):
        raise NotImplementedError


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


def test_a_part_is_not_called_as_what_means_something_of_every_drafter():
    drafter = Constant(7)
    for name, part in (("layers", torch.nn.ModuleList()), ("target", torch.nn.Parameter(torch.zeros(1)))):
        with pytest.raises(UserError, match=f"Constant calls a part of it {name}, .*: expected another name"):
            setattr(drafter, name, part)
    drafter.layers = (1, 2)
    assert drafter.layers == (1, 2)


def test_features_are_left_alone_unless_a_drafter_says_otherwise():
    features = object()
    assert Constant(7).augment(features, torch.Generator()) is features


def test_families_are_called_by_the_word_of_the_command_line():
    served = {Eagle: "eagle", Eagle3: "eagle3", PEagle: "p_eagle", MTP: "mtp", Medusa: "medusa", DFlash: "dflash"}
    served |= {DraftModel: "draft_model", Pard: "pard", DSpark: "dspark", TliDraft: "tli_draft"}
    others = {Hydra: "hydra", Domino: "domino", PromptLookup: "prompt_lookup", ReDrafter: "redrafter"}
    assert all(kind.family == name for kind, name in (served | others).items())
    assert set(VLLM.families) == set(served.values())


def test_what_has_parameters_drafts_from_distributions():
    drafter = Constant(3)
    assert not drafter.draws
    drafter.head = torch.nn.Linear(2, 2)
    assert drafter.draws
