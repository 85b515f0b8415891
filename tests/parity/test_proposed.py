"""What vLLM is asked to run by our proposer: look-ups, a look-up before a draft model, drafts of adaptive length."""

from dataclasses import replace

import pytest

from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.targets import Target
from tests.fakes import tiny_llama
from tests.parity.proposed import PROPOSED, USUAL, Proposed
from tests.parity.short import SHORT


@pytest.mark.parametrize("name", PROPOSED)
def test_both_sides_are_given_the_same(name, tmp_path):
    kind, checkpoint = PROPOSED[name], None
    if kind.drafts:
        target = Target.from_model(tiny_llama())
        checkpoint = save_drafter(DraftModel.for_target(target), tmp_path / "drafter", target.identity)
    case = Proposed.of(name, checkpoint, "org/model", 5, tmp_path)
    assert case.run(5)["additional"]["specdraft"].get("stop") == kind.settings.stop
    assert (case.shape(5).stop is None) == (kind.settings.stop is None) and not case.shape(5).sampled
    assert case.run(5).get("max_num_seqs") == (1 if kind.remembers else None)
    assert (kind.settings.retrieval is None) == (not hasattr(case.drafter, "retrieval"))


def test_what_is_usual_is_of_every_sort():
    assert all(PROPOSED[name].least > 1 for name in PROPOSED)
    usual = [PROPOSED[name] for name in USUAL]
    assert {kind.drafts for kind in usual} <= {None, *SHORT}
    assert any(kind.settings.stop for kind in usual) and any(kind.settings.retrieval for kind in usual)
    assert any(replace(kind.settings, drafter=None) != kind.settings for kind in usual)
