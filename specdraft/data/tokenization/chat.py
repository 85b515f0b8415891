"""Conversations as token ids with a loss mask, by the target's own chat template.

Two ways in. A response that the target generated is a list of token ids and stays one: decoding and tokenizing it
again would give other tokens than the ones that were sampled. A conversation in words is rendered by the template, and
``assistant_mask.py`` or the template's own marks say which tokens are the assistant's."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from specdraft.data.sources.base import Conversation, Message
from specdraft.data.tokenization.assistant_mask import MARKS, assistant_mask
from specdraft.errors import UserError
from specdraft.targets.chat_template import options_of
from specdraft.text import fingerprint, reason

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A document's beginning that the target is to continue: at most so many tokens, and at most half of it.
_OPENING = 128
_PLACE = "the-words-of-this-turn"
# Conversations longer than the target's context are split later: no warning about them.
_TOKENIZED = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}


class RefusedError(UserError):
    """The chat template does not take this conversation; it may well take others."""


class Example(NamedTuple):
    """A tokenized conversation; ``loss_mask`` is True on the assistant's tokens, the end mark included."""

    input_ids: list[int]
    loss_mask: list[bool]


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        said = "the target's tokenizer has no chat template"
        raise UserError(f"{said}: use an instruction-tuned target, or add a chat_template.jinja to its directory")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of vocabulary, chat template and its options; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    parts = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    options = options_of(tokenizer)
    return fingerprint([*parts, options] if options else parts)


def prompt_ids(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Token ids up to where the assistant's next answer begins."""
    _check_tokenizer(tokenizer)
    return _render(tokenizer, messages, tools, **_TOKENIZED, add_generation_prompt=True)["input_ids"]


def opening_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids that the target is to continue: a conversation up to its last answer, a document's beginning."""
    if conversation.prompt_messages:
        return prompt_ids(tokenizer, conversation.prompt_messages, conversation.tools)
    ids = _document_ids(tokenizer, conversation)
    return ids[: max(1, min(_OPENING, len(ids) // 2))]


def question_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], int]:
    """Token ids up to where the user's next turn begins, and the id with which the template ends that turn. Whoever
    continues these ids writes what a user would say (Magpie, arXiv 2406.08464, section 2). Raises RefusedError."""
    _check_tokenizer(tokenizer)
    turn = {"role": "user", "content": _PLACE}
    text = _render(tokenizer, [*messages, turn], (), tokenize=False, add_generation_prompt=False)
    before, found, after = text.rpartition(_PLACE)
    begin, end = (tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in (before, after))
    if not found or not end:
        raise RefusedError("the target's chat template does not mark where a user's turn ends: expected data of yours")
    return begin, end[0]


def answer_in_words(tokenizer: Any, ids: Sequence[int]) -> str:
    """An answer as engines hand it out and as the next prompt has it: without special tokens, and of an answer in
    channels (gpt-oss's harmony format) the final one alone."""
    channel, message = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|channel|>", "<|message|>"))
    if channel != message and channel in ids and message in ids:  # a token that is not there has the unknown one's id
        said: list[int] = []  # nothing if the final channel was not reached
        for start, token in enumerate(ids):
            if token == channel:
                end = next((place for place in range(start, len(ids)) if ids[place] == message), len(ids))
                if tokenizer.decode(ids[start + 1 : end]).strip().startswith("final"):
                    said = list(ids[end + 1 :])
        ids = said
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def example_from_words(tokenizer: Any, conversation: Conversation, end_ids: Collection[int]) -> Example:
    """A conversation as it was written, all its assistant's turns supervised; of a document, all but its first token.
    ``end_ids`` are the marks at which the target stops. Raises UserError, with the conversation's id, if it has no
    answer, if the template refuses it, or if the assistant's tokens cannot be located for certain."""
    if conversation.response is None:
        said = f"the conversation {conversation.id} has no response: set data.regenerate=true"
        raise UserError(f"{said}, or use conversations that end with the assistant's answer")
    if not conversation.prompt_messages:
        end = tokenizer.eos_token_id
        ids = _document_ids(tokenizer, conversation) + ([] if end is None else [end])
        return Example(ids, [False] + [True] * (len(ids) - 1))
    _check_tokenizer(tokenizer)
    try:
        example = _example_from_messages(tokenizer, conversation.messages, conversation.tools, end_ids)
    except UserError as error:
        raise UserError(f"{conversation.id}: {error}") from error
    return _without_end(example, end_ids) if conversation.cut else example


def _without_end(example: Example, end_ids: Collection[int]) -> Example:
    """Up to the last of the assistant's tokens that is no end mark: the template puts one where the answer was cut."""
    said = (place for place, token in enumerate(example.input_ids) if example.loss_mask[place] and token not in end_ids)
    length = 1 + max(said, default=len(example.input_ids) - 1)
    return Example(example.input_ids[:length], example.loss_mask[:length])


def _example_from_messages(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], end_ids: Collection[int]
) -> Example:
    template = tokenizer.get_chat_template(tools=list(tools) or None)
    if _GENERATION_MARK.search(template):
        rendered = _render(tokenizer, messages, tools, **_TOKENIZED, return_assistant_tokens_mask=True)
        mask = [bool(value) for value in rendered["assistant_masks"]]
        if not any(mask):
            said = "the target's chat template marks no token as the assistant's"
            raise UserError(f"{said}: expected {MARKS} in its chat_template.jinja")
        return Example(list(rendered["input_ids"]), mask)

    def render(turns: Sequence[Message], prompt: bool) -> str:
        return _render(tokenizer, turns, tools, tokenize=False, add_generation_prompt=prompt)

    return Example(*assistant_mask(tokenizer, render, messages, end_ids))


def _document_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    if tokenizer is None:
        raise UserError("the target has no tokenizer: expected one in its directory")
    ids = tokenizer(conversation.response, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def _render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            **options_of(tokenizer),
            **options,
        )
    except Exception as error:  # templates raise what they like, mostly jinja2's errors
        roles = ", ".join(message["role"] for message in messages)
        said = f"the target's chat template cannot render the roles {roles} ({reason(error)})"
        raise RefusedError(f"{said}: expected conversations that it accepts") from error
