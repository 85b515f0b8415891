"""What only full precision bears is found."""

from tests.check.mine import failure

CAST = "state = state.to(self.up.weight.dtype)"


def test_a_loss_that_strays_in_low_precision():
    strays = f"{CAST}; state = state * (1 + 2 * (self.target.dtype == torch.bfloat16))"
    said = failure(
        "precision", (CAST, f"{strays}; state = state * (1 if self.target.dtype != torch.bfloat16 else torch.inf)")
    )
    assert "under bf16 autocast" in said
