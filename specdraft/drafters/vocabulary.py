"""The draft vocabulary: the target ids that a drafter can propose, kept with its weights.

V / Vd = target / draft vocabulary.

A smaller vocabulary makes a cheaper projection; a token outside it is never drafted, and counts as a miss."""

import torch
from torch import Tensor, nn

from specdraft.drafters.draft_tree_builder import Vocabulary
from specdraft.errors import UserError


class DraftVocabulary(nn.Module):
    """Mixin of drafters that project to a draft vocabulary, in the layout of serving engines. d2t: int64 ``[Vd]``
    offsets, target id = i + d2t[i]. t2d: bool ``[V]``, which target ids can be drafted."""

    vocab_size: int
    d2t: Tensor
    t2d: Tensor

    def register_vocabulary(self, vocab_size: int, draft_vocab_size: int, persistent: bool = True) -> None:
        """Ids 0..Vd-1 until ``set_draft_vocabulary``; a checkpoint holds them if ``persistent``. Raises UserError for a
        draft vocabulary larger than the vocabulary."""
        if not 1 <= draft_vocab_size <= vocab_size:
            raise UserError(f"draft_vocab_size is {draft_vocab_size}: expected 1 to {vocab_size}, the target's size")
        self.vocab_size = vocab_size
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64), persistent)
        self.register_buffer("t2d", torch.arange(vocab_size) < draft_vocab_size, persistent)

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Take the ascending target ids ``[Vd]`` as the draft vocabulary. Raises UserError if they are not that."""
        size = len(self.d2t)
        if len(ids) != size or bool((ids.diff() <= 0).any()) or ids[0] < 0 or ids[-1] >= self.vocab_size:
            wanted = f"{size} ascending ids below {self.vocab_size}"
            raise UserError(f"the draft vocabulary has {len(ids)} ids: expected {wanted}")
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ``[Vd]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def vocabulary(self) -> Vocabulary:
        """Without ids where the draft vocabulary is the target's own."""
        return Vocabulary(self.vocab_size, None if len(self.d2t) == self.vocab_size else self.draft_ids)
