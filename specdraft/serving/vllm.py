"""vLLM's ``custom_class``: a proposer that vLLM loads by its dotted name and asks for drafts (as 0.32 does).

It is handed what was sampled and the texts, and no hidden states, so that it runs what drafts from tokens alone. The
drafter is named in vLLM's additional configuration (``settings.py``)."""

from collections.abc import Sequence
from typing import Any

import torch

from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.draft_model import DraftModel
from specdraft.errors import UserError
from specdraft.serving.follower import Follower, Ids
from specdraft.serving.settings import ProposerSettings


class Proposer:
    """Drafts of up to ``num_speculative_tokens`` tokens for each request, or none. They are chosen, not sampled, so
    that vLLM verifies them as point masses at every temperature."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises UserError for settings that name no such drafter, and for a draft of another vocabulary."""
        self.drafter, stop = ProposerSettings.read(vllm_config.additional_config).build()
        ours = [each.language_model.vocab_size for each in self.drafter.modules() if isinstance(each, DraftModel)]
        theirs = vllm_config.model_config.get_vocab_size()
        if ours and ours[0] != theirs:
            wanted = "a draft model that was trained for this target"
            raise UserError(
                f"the draft has a vocabulary of {ours[0]} tokens and the target one of {theirs}: expected {wanted}"
            )
        self.shape = StaticTree.chain(vllm_config.speculative_config.num_speculative_tokens, sampled=False, stop=stop)
        self.rows = vllm_config.scheduler_config.max_num_seqs
        self.limit, self.dtype = vllm_config.model_config.max_model_len, vllm_config.model_config.dtype
        # What looks things up does so on the host.
        self.device = torch.device(vllm_config.device_config.device if self.drafter.draws else "cpu")

    def load_model(self, target_model: Any) -> None:
        """Put the drafter where the target is; of the target it needs nothing."""
        self.drafter.to(self.device, self.dtype)
        self.follower = Follower(self.drafter, self.shape, self.rows, self.limit, self.device)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the first B rows. sampled_token_ids: what was emitted in each, nothing while a prompt is read.
        num_tokens_no_spec: ``[rows]``, the lengths of the texts with it. token_ids_cpu: ``[rows, max_model_len]``."""
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        texts = [token_ids_cpu[row, :length] for row, length in enumerate(lengths)]
        return self.follower.drafts(texts, [len(emitted) for emitted in sampled_token_ids])
