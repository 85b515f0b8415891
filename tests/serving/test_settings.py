"""What an engine's process is told: written and read back, and what is wrong with it in a sentence."""

import json

import pytest

from specdraft.decoding.stopping import EntropyBound
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.suffix import Suffix
from specdraft.errors import UserError
from specdraft.serving.settings import ProposerSettings
from specdraft.targets import Target
from tests.fakes import tiny_llama

SLEM = {"_target_": "specdraft.drafters.slem.Slem", "model": "nowhere"}
SUFFIX = {"_target_": "specdraft.drafters.suffix.Suffix", "max_tree_depth": 12}
UNLEARNED = {"_target_": "specdraft.decoding.stopping.Learned", "least": 0.4}
UNMEASURED = {"_target_": "specdraft.decoding.pacing.Goodput"}
ENTROPY = {"_target_": "specdraft.decoding.stopping.EntropyBound", "least": 0.3}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    target, folder = Target.from_model(tiny_llama()), tmp_path_factory.mktemp("checkpoints")
    drafters = {"draft": DraftModel.for_target(target), "medusa": Medusa.for_target(target, num_heads=2)}
    return {name: str(save_drafter(each, folder / name, target.identity)) for name, each in drafters.items()}


def test_what_is_written_is_read(checkpoints):
    settings = ProposerSettings(checkpoint=checkpoints["draft"], retrieval=SUFFIX, stop=ENTROPY)
    entry = json.loads(json.dumps(settings.entry()))
    assert ProposerSettings.read(entry | {"other": 1}) == settings
    assert "retrieval_min_tokens" not in entry["specdraft"]
    drafter, stop = settings.build()
    assert isinstance(drafter, Hybrid) and isinstance(drafter.head, DraftModel) and not drafter.training
    assert drafter.retrieval.max_tree_depth == 12 and stop == EntropyBound(least=0.3)


def test_what_needs_no_training():
    drafter, stop = ProposerSettings(drafter=SUFFIX).build()
    assert isinstance(drafter, Suffix) and drafter.max_tree_depth == 12 and stop is None


@pytest.mark.parametrize("additional", [{}, None, {"specdraft": "suffix"}, {"specdraft": {"drafters": SUFFIX}}])
def test_settings_that_are_none(additional):
    with pytest.raises(UserError, match=r"additional configuration .*: expected an object with drafter, checkpoint"):
        ProposerSettings.read(additional)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, "names neither a drafter nor a checkpoint"),
        ({"drafter": SUFFIX, "checkpoint": "draft"}, "names a drafter and a checkpoint"),
        ({"checkpoint": "medusa"}, "medusa does not draft from tokens alone"),
        ({"drafter": {"_target_": "specdraft.drafters.jacobi.Jacobi"}}, "jacobi does not draft from tokens alone"),
        ({"drafter": SLEM}, "slem does not draft from tokens alone"),
        ({"drafter": SUFFIX, "retrieval": SLEM}, "slem does not draft from tokens alone"),
        ({"drafter": ENTROPY}, "EntropyBound does not draft"),
        ({"drafter": SUFFIX, "stop": ENTROPY}, "suffix has no distributions for a rule"),
        ({"checkpoint": "draft", "stop": UNLEARNED}, r"expected decoding\.shape\.stop\.weights="),
        (
            {"checkpoint": "draft", "stop": UNMEASURED},
            r"decoding\.shape\.stop\.costs=\[FIRST,\.\.\.,FURTHER\]",
        ),
        ({"drafter": {"_target_": "specdraft.drafters.suffix.Sufix"}}, "cannot be built .*has no attribute"),
        ({"drafter": {"_target_": "nowhere.Suffix"}}, "cannot be built .*No module"),
        ({"drafter": {"max_tree_depth": 3}}, "cannot be built"),
        ({"drafter": SUFFIX | {"depth": 3}}, "cannot be built .*unexpected keyword argument 'depth'"),
        ({"drafter": SUFFIX | {"max_tree_depth": 1}}, "max_tree_depth=1: expected at least 2"),
        ({"checkpoint": "draft", "retrieval": SUFFIX, "retrieval_min_tokens": 0}, "min_tokens is 0"),
    ],
)
def test_bad_settings(checkpoints, settings, wrong):
    settings = settings | ({"checkpoint": checkpoints[settings["checkpoint"]]} if "checkpoint" in settings else {})
    with pytest.raises(UserError, match=wrong):
        ProposerSettings(**settings).build()
