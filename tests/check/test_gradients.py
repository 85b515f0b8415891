"""What does not learn, and what should not, is found by its name."""

import re

import pytest

from specdraft.check import random_target
from tests.check.mine import failure, outcome

UP = "self.up = nn.Linear(2 * hidden_size, width)"
BIND = "drafter.bind(target)"


@pytest.mark.parametrize(
    "change", [(UP, f"{UP}; self.unused = nn.Linear(3, 2)"), ("silu(self.up(given))", "silu(self.up(given).detach())")]
)
def test_a_parameter_without_gradient_is_named(change):
    said = failure("gradients", change)
    assert re.match(r"no gradient reaches (unused|up|norm_token)\.weight: expected one", said)


def test_frozen_parameters_are_counted():
    found = outcome("gradients", (UP, f"{UP}; self.kept = nn.Linear(3, 2).requires_grad_(False)"))
    assert "2 are frozen" in found.sentence


def test_a_gradient_that_is_no_number_is_named():
    said = failure(
        "gradients",
        ("self.read(state, alignment", "(1 + 0 * (state - state).abs().sqrt()) * self.read(state, alignment"),
    )
    assert "is not finite" in said or "no gradient" in said


def test_weights_of_the_target_inside_the_drafter_are_named():
    said = failure("target", (BIND, f"{BIND}; drafter.words = target.model.get_input_embeddings()"))
    assert "words.weight is the target's own model.embed_tokens.weight" in said


def test_a_target_that_changes_is_named():
    step = "alignment = align(batch, self.steps)"
    said = failure("target", (step, f"{step}; target.embedding_weight.data.mul_(1.01)"), beside=random_target())
    assert "model.embed_tokens.weight changes in a training step" in said
    said = failure("target", (step, f"{step}; target.embedding_weight.requires_grad_(True)"), beside=random_target())
    assert "model.embed_tokens.weight is trained by" in said
