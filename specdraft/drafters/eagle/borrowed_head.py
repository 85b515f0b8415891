"""Heads whose output the target's own projection reads: whole vocabulary, own scale and soft-cap, not trained.

n = positions, H = hidden size, V = vocabulary."""

from collections.abc import Sequence

from torch import Tensor

from specdraft.drafters.base import TrainingLoss
from specdraft.drafters.draft_tree_builder import Vocabulary
from specdraft.drafters.eagle.head import EagleHead
from specdraft.errors import UserError
from specdraft.losses.chunked import FrozenHead, Step, Teacher
from specdraft.targets import Target


class BorrowedHead(EagleHead):
    """An ``EagleHead`` without a projection of its own."""

    TITLE: str  # in a sentence

    @classmethod
    def check_whole(cls, target: Target, draft_vocabulary: Tensor | None) -> None:
        """Raises UserError for a draft vocabulary that is not the whole."""
        if draft_vocabulary is not None and len(draft_vocabulary) != target.vocab_size:
            given = f"the draft vocabulary has {len(draft_vocabulary)} of {target.vocab_size} ids"
            wanted = f"{cls.TITLE}, with the target's head, expects all; set model.draft_vocab_size=null"
            raise UserError(f"{given}: {wanted}")

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's own."""
        return Vocabulary(self.vocab_size)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """With the target's LM head, which passes gradients on and gets none."""
        forward, backward = super().training_flops(sequence_length)
        projection = self.passes * 2.0 * self.vocab_size * self.layer_config.hidden_size
        return forward + projection, backward + projection

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``EagleHead``: ``[n, V]``."""
        return self.target.logits(hidden.to(self.target.dtype))

    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        return self._learn([FrozenHead(self.logits, self.vocab_size)], steps, teacher)
