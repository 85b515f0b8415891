"""What a checkpoint does not hold is found."""

from tests.check.mine import failure


def test_arguments_that_are_not_noted():
    assert "constructor_arguments" in failure("checkpoint", ("        self._arguments = arguments\n", ""))


def test_a_number_that_is_drawn_and_not_kept():
    held = "self.steps, self.step_decay = steps, step_decay"
    changes = (
        (held, f"{held}; self.scale = 1 + __import__('random').random()"),
        ("self.down(silu(self.up(given)))", "self.scale * self.down(silu(self.up(given)))"),
    )
    assert "drafts otherwise than the saved one" in failure("checkpoint", *changes)
