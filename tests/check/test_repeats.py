"""Chance from elsewhere than where the seed reaches is found."""

from tests.check.mine import failure

WEIGHT = "weight=self.step_decay**step"


def test_chance_of_the_start():
    change = (
        "nn.init.normal_(self.head.weight, std=0.02)",
        "import os; nn.init.constant_(self.head.weight, os.urandom(1)[0])",
    )
    assert "head.weight begins otherwise" in failure("repeats", change)


def test_chance_of_a_step():
    assert "a batch's loss" in failure("repeats", (WEIGHT, f"{WEIGHT} * __import__('random').random()"))


def test_chance_of_a_draft():
    change = ("return self.head(self.norm_state(hidden))", "return self.head(self.norm_state(hidden)) * torch.rand(())")
    assert "`chance` alone" in failure("repeats", change)
