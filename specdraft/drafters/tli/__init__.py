"""TLI: an independent draft model whose tokenizer is not the target's."""

from specdraft.drafters.tli.tli_draft import TliDraft

__all__ = ["TliDraft"]
