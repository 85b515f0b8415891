"""What an arm gains is said against the recipe of the same seed."""

import pytest
from hydra import compose, initialize_config_dir

from ablation import ARMS, RECIPE, gain
from specdraft.drafters.eagle import MTP, Eagle, Eagle3
from specdraft.entry import CONF, build
from specdraft.targets import Target
from tests.fakes import tiny_llama


def test_gains_are_taken_seed_by_seed():
    rows = [{"arm": RECIPE, "seed": seed, "T=0": value} for seed, value in ((0, 2.0), (1, 4.0))]
    rows += [{"arm": "Muon", "seed": seed, "T=0": value} for seed, value in ((0, 2.2), (1, 4.4))]
    assert gain(rows, RECIPE, "T=0") == "3.00"
    assert gain(rows, "Muon", "T=0") == "3.30 (+10.0% ± 0.0%)"
    assert gain(rows[:1] + rows[2:3], "Muon", "T=0") == "2.20 (+10.0%)"


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_makes_a_drafter_and_no_two_are_alike(arm: str) -> None:
    target = Target.from_model(tiny_llama(num_hidden_layers=6))
    overrides = [part.format(last="[2,3,6]", half="32") for part in ARMS[arm]]
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", [*overrides, "target=tiny"])
    drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=None)
    assert type(drafter) is {"EAGLE-1": Eagle, "MTP": MTP}.get(arm.removesuffix(", Muon"), Eagle3)
    build(config.model.optimizer)
    assert [other for other in ARMS if sorted(ARMS[other]) == sorted(ARMS[arm])] == [arm]
