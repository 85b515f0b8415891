"""Tiny random targets, and drafters whose every draft is known: what tests of decoding need instead of real ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.drafting import SingleDrafter
from specdraft.targets import Features


def tiny_llama(vocab_size: int = 64, context: int = 96, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A random fp32 Llama of two layers that loops a little, as language does, and never ends a text."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": vocab_size,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": context,
                "tie_word_embeddings": True,
                "initializer_range": 0.2,  # far from uniform
                "bos_token_id": None,
                "eos_token_id": None,
            }
            | options
        )
    ).eval()


def random_prompts(count: int, lengths: Sequence[int], vocab_size: int = 64, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of random ids whose lengths go round ``lengths``."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (lengths[i % len(lengths)],), generator=g).tolist() for i in range(count)]


def transformers_greedy(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """transformers' own greedy ``generate``; prompts of one length share a batch, so that nothing is padded."""
    answers: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[index] for index in chosen])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        answers |= dict(zip(chosen, out[:, length:].tolist(), strict=True))
    return [answers[index] for index in range(len(prompts))]


@dataclass
class ReplayState:
    """How many tokens were emitted, and what ``advance`` brought."""

    emitted: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)


class Replay(SingleDrafter):
    """Drafts the known greedy ``continuation``, each token replaced by a wrong one with probability ``error``.

    ``error`` 0 is accepted always, 1 never. It keeps what it was told: ``states`` holds one state per request.
    """

    def __init__(
        self, continuation: Sequence[int], error: float, vocab_size: int, seed: int = 0, layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.continuation, self.error, self.vocab_size = list(continuation), error, vocab_size
        self.layers = layers
        self.generator = torch.Generator().manual_seed(seed)
        self.states: list[ReplayState] = []

    def start(self, first_token: int, max_length: int) -> ReplayState:
        self.states.append(ReplayState())
        return self.states[-1]

    def advance(self, state: ReplayState, tokens: Tensor, features: Features) -> None:
        state.emitted += len(tokens) if state.tokens else 1  # the first call brings the prompt and one emitted token
        state.tokens.append(tokens)
        state.features.append(features)

    def draft(self, state: ReplayState, shape: Shape, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        tokens = torch.tensor(self.continuation[state.emitted : state.emitted + shape.depth], dtype=torch.int64)
        wrong = torch.rand(len(tokens), generator=self.generator) < self.error
        return DraftTrees.chains((tokens + wrong)[None] % self.vocab_size)


@dataclass
class TargetAsDraftState:
    """The text so far, how much of it is read, and a cache of its own."""

    text: list[int]
    cache: StaticCache
    read: int = 0


class TargetAsDraft(SingleDrafter):
    """Drafts with the target itself, so that q = p and nothing may be rejected."""

    def start(self, first_token: int, max_length: int) -> TargetAsDraftState:
        return TargetAsDraftState([first_token], self.target.new_cache(1, max_length))

    def advance(self, state: TargetAsDraftState, tokens: Tensor, features: Features) -> None:
        state.text += tokens.tolist()

    def draft(self, state: TargetAsDraftState, shape: Shape, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        tokens, q, held = [], [], state.read
        unread = torch.tensor([state.text[held:]])
        state.read = len(state.text)
        for depth in range(shape.depth):
            reading = Pass.text(unread, torch.tensor([held]), held, simple=True)
            held += unread.shape[1]
            logits = self.target.logits(self.target.step(reading, state.cache).last[:, -1])
            q.append(sampling.probabilities(logits))
            drawn = logits.argmax(-1) if sampling.greedy else sample(q[-1], chance.uniform(2**20 + depth, 1)[:, 0])
            unread = drawn[:, None]
            tokens.append(unread)
        return DraftTrees.chains(torch.cat(tokens, dim=1), None if sampling.greedy else torch.stack(q, dim=1))
