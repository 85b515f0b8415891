"""Drafts whose tokens are a target's under other numbers, but for some."""

import torch

from specdraft.drafters.tli import TliDraft
from specdraft.drafters.tli.tokens import SharedTokens
from specdraft.targets import Target
from tests.fakes import tiny_llama


def some_shared(vocab_size: int, draft_vocab_size: int, seed: int = 0) -> SharedTokens:
    """Two thirds of what could be shared, chosen and numbered at random; token 1 of the draft is the unknown one."""
    g = torch.Generator().manual_seed(seed)
    count = 2 * min(vocab_size, draft_vocab_size) // 3
    target = torch.randperm(vocab_size, generator=g)[:count].sort().values
    return SharedTokens(target, torch.randperm(draft_vocab_size, generator=g)[:count], unknown=1)


def translating(target: Target, draft_vocab_size: int | None = None, **options) -> TliDraft:
    """A random draft of three fewer tokens than ``target``, or of so many."""
    size = draft_vocab_size or target.vocab_size - 3
    tokens = some_shared(target.vocab_size, size)
    model = {"num_hidden_layers": 1} | options
    config = tiny_llama(size, target.max_length, **model).config.to_dict()
    draft = TliDraft(vocab_size=target.vocab_size, shared_size=len(tokens.target), model=config)
    draft.shared.share(tokens)
    draft.bind(target)
    return draft
