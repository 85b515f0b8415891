"""A difference between training and decoding is found, whichever side makes it."""

import pytest

from specdraft.check import Level
from tests.check.mine import failure, outcome

WHERE = {
    "the hidden state of another place": ("features.last[0, -1:]", "features.last[0, :1]"),
    "the teacher of another position": (
        "Step(self.norm_state(state), at + 1 + step",
        "Step(self.norm_state(state), at + step",
    ),
    "a norm that one side forgets": (
        "logits = self.head(self.norm_state(hidden[:, 0]))",
        "logits = self.head(hidden[:, 0])",
    ),
    "a later step": ("return self.head(self.norm_state(hidden))", "return self.head(hidden)"),
    "a token that is read twice": (
        'state["last"])[None]',
        'state["last"])[None]; hidden = self.read(hidden[0], state["last"])[None]',
    ),
}


@pytest.mark.parametrize("change", WHERE.values(), ids=WHERE)
def test_what_is_served_otherwise_than_trained_is_found(change):
    said = failure("trained_is_served", change)
    assert "expected" in said and ("training" in said)


def test_a_loss_of_ones_own_is_not_seen():
    made = "TrainingLoss((state**2).mean(), {})"
    before = (
        "return call_with_weights([self.head], lambda weights: objective(weights, teacher, steps, self.divergence))"
    )
    found = outcome(
        "trained_is_served",
        (before, f"return {made}"),
        ("import constructor_arguments", "import constructor_arguments, TrainingLoss"),
    )
    assert found.level is Level.NOT_APPLICABLE and "`objective`" in found.sentence


def test_a_state_that_depends_on_the_rounds_is_found():
    change = ("features.last[0, -1:]", 'features.last[0, -1:] + 0.3 * state.get("hidden", 0.0)')
    assert "keep in `advance` only what was emitted" in failure("rounds", change)


def test_a_draft_that_stays_in_the_state_is_found():
    change = (
        "return self.head(self.norm_state(hidden))",
        'state["hidden"] = hidden[0, :1]; return self.head(self.norm_state(hidden))',
    )
    assert "leave what `advance` keeps as it was" in failure("drafting", change)
