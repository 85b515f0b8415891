"""Independent drafts with a tokenizer of their own: token-level intersection (TLI, 2502.05202).

V / Vs = vocabulary of the target / what is shared, H = the draft's hidden size."""

import warnings
from typing import Any, Self

from torch import Tensor

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.draft_start import sibling_size
from specdraft.drafters.tli.shared_vocabulary import SharedVocabulary, TranslatingModel
from specdraft.drafters.tli.tokens import served_tokenizer, shared_tokens, tokenizer_files
from specdraft.targets import Target, loading

SERVED = "served_"


class TliDraft(DraftModel):
    """A draft model that is trained and drafts on the tokens that it shares with the target; vLLM's method
    ``draft_model`` loads it with ``use_heterogeneous_vocab``.

    Its ``files`` are its own tokenizer's, and with ``SERVED`` before their names those that stand for them in an engine
    (``served_tokenizer``)."""

    quantizable = False
    shares_tokenizer = False

    def __init__(self, vocab_size: int, shared_size: int, **shared: Any) -> None:
        """``vocab_size``: V. ``shared_size``: Vs, the first ids of both until ``shared.share``. The rest is what
        ``DraftModel`` takes. Raises UserError as it does, and if more is shared than there is."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        self._arguments |= arguments
        self.shared = SharedVocabulary(vocab_size, self.language_model.vocab_size, shared_size)
        self.language_model = TranslatingModel(self.language_model.model, self.shared)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        *start: Any,
        checkpoint: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> Self:
        """As ``DraftModel.for_target`` with start=checkpoint, of a model with another tokenizer than the target's. In
        a plan, which has no tokenizers, all that can be shared is. Raises UserError if too little is."""
        size = sibling_size(target, checkpoint, revision, options.get("shape"))
        planned, common = target.device.type == "meta", min(target.vocab_size, size)
        if not planned:
            tokenizer = loading.load_tokenizer(str(checkpoint), revision)
            tokens = shared_tokens(target.tokenizer, tokenizer, target.vocab_size, size)
            common = len(tokens.target)
        options |= {"checkpoint": checkpoint, "revision": revision, "vocab_size": target.vocab_size}
        draft = super().for_target(target, draft_vocabulary, *start, shared_size=common, **options)
        if not planned:
            draft.shared.share(tokens)
            found = f"the tokenizer of {checkpoint!r} shares {common} of the target's {target.vocab_size} tokens"
            warnings.warn(f"{found}: the draft proposes those alone, and reads others as unknown", stacklevel=2)
            served = served_tokenizer(tokens, target.tokenizer, size)
            draft.files = {**tokenizer_files(tokenizer), **{SERVED + name: file for name, file in served.items()}}
        return draft

    def served(self) -> Self:
        """See ``DraftModel``."""
        draft = super().served()
        if draft is not self:
            draft.shared.load_state_dict(self.shared.state_dict())
            draft.files = self.files
        return draft

    def _taught(self, weights: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        return [weight[self.shared.rows] for weight in weights], self.shared.draft_ids
