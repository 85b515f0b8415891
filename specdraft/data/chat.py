"""Conversations as token ids with a loss mask, by the target's own chat template.

Two ways in. A response that the target generated is a list of token ids and stays one: decoding and tokenising it
again would give other tokens than the ones that were sampled. A response in words is rendered by the template, whose
generation marks say which tokens are the assistant's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdraft.data.source import Message
from specdraft.errors import UserError


class Example(NamedTuple):
    """A tokenised conversation; ``loss_mask`` is True on the assistant's tokens, the end mark included."""

    input_ids: list[int]
    loss_mask: list[bool]


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UserError unless the tokenizer can render conversations."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the target's tokenizer has no chat template: use an instruction-tuned target, "
            "or add a chat_template.jinja to its directory"
        )


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids up to where the assistant's next answer begins."""
    check_tokenizer(tokenizer)
    return _render(tokenizer, messages, add_generation_prompt=True)["input_ids"]


def example_from_ids(prompt: Sequence[int], response: Sequence[int]) -> Example:
    """A prompt and the token ids that the target answered with, untouched."""
    return Example([*prompt, *response], [False] * len(prompt) + [True] * len(response))


def example_from_text(tokenizer: Any, messages: Sequence[Message], response: str) -> Example:
    """A conversation with a response in words. All its assistant turns are supervised.

    Raises UserError if the template does not mark the assistant's tokens.
    """
    check_tokenizer(tokenizer)
    rendered = _render(
        tokenizer, [*messages, {"role": "assistant", "content": response}], return_assistant_tokens_mask=True
    )
    mask = [bool(value) for value in rendered["assistant_masks"]]
    if not any(mask):
        raise UserError(
            "the target's chat template does not mark the assistant's tokens: set data.regenerate=true (which needs "
            "no marks), or put {% generation %} and {% endgeneration %} around the assistant's content and end mark "
            "in its chat_template.jinja"
        )
    return Example(list(rendered["input_ids"]), mask)


def _render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, return_dict=True, **options
        )
    except Exception as error:  # templates raise what they like, mostly jinja2's errors
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the target's chat template cannot render the roles {roles} ({' '.join(str(error).split())}): "
            "expected conversations that this template accepts"
        ) from error
