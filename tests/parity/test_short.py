"""The variants that the real engine is asked to serve have every option there is."""

from specdraft.export.eagle3 import OPTIONS
from tests.parity.short import LEAST_ACCEPTANCE_LENGTH, SHORT


def test_together_the_variants_have_every_option():
    said = [option.partition("=") for short in SHORT.values() if short.model == "eagle3" for option in short.options]
    used = {name for name, _, value in said if value != str(OPTIONS.get(name)).lower()}
    assert used >= {*OPTIONS, "layers"}


def test_what_is_trained_is_what_is_said():
    overrides = SHORT["eagle3-qwen3"].overrides()
    assert "model=eagle3" in overrides and "model.drafter.qk_norm=true" in overrides
    assert "model.draft_vocab_size=null" in SHORT["medusa"].overrides()


def test_no_family_passes_unaccepted():
    assert all(least > 1 for least in LEAST_ACCEPTANCE_LENGTH.values())
