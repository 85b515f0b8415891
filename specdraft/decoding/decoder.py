"""The decode loop: one loop for plain decoding and for drafting, so that their difference is the drafter alone.

Each round: the drafter proposes K tokens, the target reads them behind the last emitted token in one pass, the rule
accepts a prefix and adds one token of the target's own. What was rejected is taken back from the target's cache.

Accounting is vLLM's: the prompt's pass emits the first token and is no round; every later target pass is one; drafted
tokens that were accepted count even where they run past the end of text or the token limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.tree import DraftTree
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target


@dataclass
class Generation:
    """What one request produced. tokens: emitted ids, cut behind the first end of text and at the limit.

    drafted, accepted: per round, tokens proposed and tokens accepted. Seconds: of the prompt's pass, of all rounds
    after it (each with what the drafter does there), and the drafter's share of the rounds.
    """

    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0


class Decoder:
    """Target + drafter + sampling settings; without a drafter it is plain autoregressive decoding."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 5,
        sampling: Sampling | None = None,
    ) -> None:
        """Raises UserError for a drafter that is to draft fewer than 1 token."""
        if drafter is not None and num_draft_tokens < 1:
            raise UserError(
                f"num_draft_tokens is {num_draft_tokens}: expected at least 1; to decode plainly, leave the drafter out"
            )
        self.target, self.drafter = target, drafter
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.sampling = sampling or Sampling()
        if drafter is not None:
            drafter.bind(target)

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """Decode one prompt until the end of text, ``max_new_tokens``, or the end of the target's context.

        Raises UserError for an empty prompt and for one that leaves no room in the context.
        """
        target, drafter, device = self.target, self.drafter, self.target.device
        room = target.max_length - len(prompt_ids)
        if not prompt_ids or room < 1 or max_new_tokens < 1:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens and {max_new_tokens} are to be generated: expected at least "
                f"1 of each, and room for an answer in the target's context of {target.max_length} tokens"
            )
        limit = min(max_new_tokens, room)
        generator = None if self.sampling.greedy else torch.Generator(device).manual_seed(seed)
        layers = drafter.layers if drafter is not None else ()

        started = time.perf_counter()
        capacity = len(prompt_ids) + limit + self.num_draft_tokens
        cache = target.new_cache(capacity)
        features = target.step(torch.tensor([prompt_ids], device=device), cache, layers)
        first = self._choose(target.logits(features.last[:, -1]), generator)
        tokens = [first]
        drafting = 0.0
        result = Generation(tokens)
        if drafter is not None:
            state = drafter.start(prompt_ids[0], capacity)
            drafter.advance(state, torch.tensor([*prompt_ids[1:], first], device=device), features)
        now = time.perf_counter()
        result.prefill_seconds = now - started

        while len(tokens) < limit and not (target.eos_token_ids and target.eos_token_ids.intersection(tokens)):
            held = cache.length  # the last emitted token is not yet in the cache
            # A draft may not run past the context; behind its last position the target has nothing to say.
            num_draft = min(self.num_draft_tokens, target.max_length - held - 1)
            tree = DraftTree.chain(torch.empty(0, dtype=torch.int64, device=device))
            if drafter is not None and num_draft > 0:
                before = time.perf_counter()
                tree = drafter.draft(state, num_draft, self.sampling, generator)
                drafting += time.perf_counter() - before
            last = torch.tensor([tokens[-1]], device=device)
            features = target.step(torch.cat([last, tree.tokens])[None], cache, layers)
            logits = target.logits(features.last[0])  # [N + 1, V]
            if self.sampling.greedy:
                verdict = rules.greedy(tree, logits.argmax(-1))
            else:
                verdict = rules.rejection_sampling(tree, self.sampling.probabilities(logits), generator)
            cache.crop(held + 1 + verdict.accepted)
            emitted = [*tree.tokens[: verdict.accepted].tolist(), verdict.next_token]
            tokens += emitted
            if drafter is not None:
                result.drafted.append(len(tree))
                result.accepted.append(verdict.accepted)
                before = time.perf_counter()
                kept = type(features)(*(part[:, : len(emitted)] for part in features))
                drafter.advance(state, torch.tensor(emitted, device=device), kept)
                drafting += time.perf_counter() - before
        result.decode_seconds = time.perf_counter() - now
        result.draft_seconds = drafting
        result.tokens = cut(tokens, limit, target.eos_token_ids)
        return result

    def _choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> int:
        if self.sampling.greedy:
            return int(logits.argmax(-1))
        return int(sample(self.sampling.probabilities(logits), generator))


def cut(tokens: Sequence[int], limit: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to ``limit`` and to the first end of text, which stays: how every decoder's output is counted."""
    kept = list(tokens[:limit])
    for index, token in enumerate(kept):
        if token in eos_token_ids:
            return kept[: index + 1]
    return kept
