"""Answers that are not the target's own are found."""

from specdraft.check import random_target
from tests.check.mine import failure

GROWN = "return grow(logits, extend, shape, sampling, chance, self.vocabulary)"


def test_a_drafter_that_writes_to_the_target_is_found():
    change = ('state["last"] = tokens[-1:]', 'state["last"] = tokens[-1:]; self.target.head.weight.data.mul_(-1)')
    assert "differs from the target's own at token" in failure("greedy", change, beside=random_target())


def test_a_q_that_nothing_was_drawn_from_is_found():
    drawn = "from dataclasses import replace; t = grow(logits, extend, shape, sampling, chance, self.vocabulary); "
    drawn += "return t if t.q is None else replace(t, q=t.q**4 / (t.q**4).sum(-1, keepdim=True))"
    assert "not drawn from the q that they come with" in failure("sampling", (GROWN, drawn), samples=600)


def test_a_q_that_changes_the_answers_is_found():
    """The likeliest tokens, said to be drawn from all alike."""
    chosen = "from dataclasses import replace; from specdraft.decoding.sampling import Sampling; "
    chosen += "t = grow(logits, extend, shape, Sampling(), chance, self.vocabulary); "
    chosen += "return replace(t, q=torch.full((*t.tokens.shape, 32), 1 / 32))"
    said = failure("sampling", (GROWN, chosen), samples=600)
    assert "are not distributed as the target's (p = " in said
