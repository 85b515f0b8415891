"""Nodes that follow from other paths than their own are found."""

from specdraft.check import Level
from tests.check.mine import failure, outcome


def test_nodes_that_all_hang_on_the_first_are_found():
    change = ("hidden.gather(1, above)", "hidden[:, :1].expand(above.shape)")
    assert "a chain along it" in failure("trees", change)


def test_a_drafter_of_chains_has_none():
    refusal = """
    def num_places(self, shape):
        from specdraft.errors import UserError
        if shape.width > 1 if hasattr(shape, "width") else True:
            raise UserError("chains alone")
        return shape.num_places

    def start("""
    found = outcome("trees", ("    def start(", refusal))
    assert found.level is Level.NOT_APPLICABLE and "chains alone" in found.sentence
    found = outcome("greedy", ("    def start(", refusal))
    assert found.level is Level.PASSED and "tree" not in found.sentence
