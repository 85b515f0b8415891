"""A draft model seen in the tokens of a target that has another tokenizer.

V / Vm = vocabulary of the target / of the draft, Vs = shared tokens, H = the draft's hidden size.

Every token of the target is one token of the draft: the one of the same text, or the draft's unknown token, as vLLM has
it. So positions are the target's. Logits are those of shared tokens at the target's ids and minus infinity elsewhere:
their softmax is the draft's distribution limited to shared tokens and renormalised, the q of token-level intersection
(2502.05202)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass
from specdraft.drafters.tli.tokens import SharedTokens
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.targets import Features, LanguageModel


class SharedVocabulary(DraftVocabulary):
    """What is shared, as the target's ids (d2t, t2d), and ``to_draft``, int64 ``[V]``: the draft's id of every token of
    the target, its unknown token's where it has none."""

    to_draft: Tensor

    def __init__(self, vocab_size: int, draft_vocab_size: int, size: int) -> None:
        """V, Vm and Vs. Raises UserError if more is shared than there is."""
        super().__init__()
        self.register_vocabulary(vocab_size, size)
        self.draft_vocab_size = draft_vocab_size
        self.register_buffer("to_draft", torch.zeros(vocab_size, dtype=torch.int64))

    def share(self, tokens: SharedTokens) -> None:
        """Take these Vs tokens."""
        self.to_draft.fill_(tokens.unknown)[tokens.target] = tokens.draft.to(self.to_draft)
        self.set_draft_vocabulary(tokens.target.to(self.to_draft))

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """As ``DraftVocabulary``. Raises UserError for tokens that the draft does not have, too."""
        super().set_draft_vocabulary(ids)
        if self.to_draft.min() < 0 or self.to_draft.max() >= self.draft_vocab_size:
            wrong = f"the checkpoint maps a token to {int(self.to_draft.max())}"
            raise UserError(f"{wrong}: expected ids of a draft of {self.draft_vocab_size} tokens; restore the file")

    @property
    def rows(self) -> Tensor:
        """The draft's ids of what is shared, ``[Vs]``, in the order of the target's."""
        return self.to_draft[self.draft_ids]

    def spread(self, logits: Tensor) -> Tensor:
        """The draft's logits ``[..., Vm]`` as those of the target's tokens, ``[..., V]``."""
        return logits[..., self.to_draft].masked_fill(~self.t2d, -torch.inf)


class TranslatingModel(LanguageModel):
    """A draft that reads the target's tokens and speaks of them."""

    def __init__(self, model: Any, shared: SharedVocabulary) -> None:
        """See ``LanguageModel``."""
        super().__init__(model)
        self.shared, self.vocab_size = shared, shared.vocab_size

    def features(self, input_ids: Tensor, position_ids: Tensor, layers: Sequence[int] = ()) -> Features:
        """See ``LanguageModel``."""
        return super().features(self.shared.to_draft[input_ids], position_ids, layers)

    def step(self, reading: Pass, cache: StaticCache, layers: Sequence[int] = (), first: int = 0) -> Features:
        """See ``LanguageModel``."""
        return super().step(reading._replace(ids=self.shared.to_draft[reading.ids]), cache, layers, first)

    def logits(self, last: Tensor) -> Tensor:
        """Logits ``[..., V]``, minus infinity outside what is shared."""
        return self.shared.spread(super().logits(last))
