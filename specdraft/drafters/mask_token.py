"""The token that stands at what is to be drafted, for drafters that propose several from one pass."""

from contextlib import suppress
from typing import Any

from specdraft.errors import UserError
from specdraft.targets.chat_template import options_of


def mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An id below ``vocab_size`` that no text of a target holds: one that the tokenizer does not reach, else its
    padding if nothing else is meant by that, else its last added token that no conversation has, else the last id. Its
    embedding marks a slot whatever it is."""
    if tokenizer is None:
        return vocab_size - 1
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in used:
        return int(tokenizer.pad_token_id)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used |= _of_conversations(tokenizer) if template else set()
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if number < vocab_size}
    idle = [number for number, text in added.items() if number not in used and text not in template]
    return max(idle, default=vocab_size - 1)


def check_mask_token(mask_token: int, vocab_size: int) -> None:
    """Raises UserError for a mask that is no token."""
    if not 0 <= mask_token < vocab_size:
        raise UserError(f"model.drafter.mask_token is {mask_token}: expected a token of 0 to {vocab_size - 1}")


def _of_conversations(tokenizer: Any) -> set[int]:
    """The ids of what the chat template makes of conversations, as far as it knows their roles."""
    found: set[int] = set()
    for roles in (("system", "user", "assistant"), ("user", "assistant")):
        with suppress(Exception):  # a template may refuse a role in words of its own
            turns = [{"role": role, "content": "a"} for role in roles]
            rendered = tokenizer.apply_chat_template(turns, tokenize=False, **options_of(tokenizer))
            found |= set(tokenizer(rendered, add_special_tokens=False).input_ids)
    return found
