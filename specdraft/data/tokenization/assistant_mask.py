"""Where the assistant speaks, for chat templates that do not mark it: found by differences, checked against the whole.

The rendering of a whole conversation is compared with renderings of its parts. A turn begins where the prompt before it
ends (the prompt is what the target is given when it has to answer) and reaches through the target's next end mark.

Some templates rewrite what came before: they drop the reasoning of earlier turns, or open the answer to be given with a
mark that earlier answers do not keep. There the turn begins with its words, found by putting others in their place.

Nothing is taken on trust: every turn must hold its own words and end before the next turn's words begin."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from specdraft.data.sources.base import Message
from specdraft.errors import UserError

Render = Callable[[Sequence[Message], bool], str]

# A text that no conversation holds and no template alters: letters of Unicode's private use area.
_OTHER_WORDS = "\ue0f1\ue0f2\ue0f3"
_END_OF_REASONING = "</think>"
MARKS = "{% generation %} and {% endgeneration %} around the assistant's content and end mark"


def assistant_mask(
    tokenizer: Any, render: Render, messages: Sequence[Message], end_ids: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Token ids of the whole conversation, and True where the assistant speaks, its end marks included.
    ``render(messages, prompt)`` is the template's text, with the beginning of an answer to come if ``prompt``. Raises
    UserError for a turn that cannot be located for certain."""
    if not getattr(tokenizer, "is_fast", False):
        said = "the target's tokenizer is a slow one, which cannot tell which words a token stands for"
        raise UserError(f"{said}: expected a fast one, {MARKS} in its chat template, or data.regenerate=true")
    whole = render(messages, False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:turn], True)
        begin = len(prompt) if whole.startswith(prompt) else _words(render, messages, turn, whole)
        # Tokens across the border are left out: the target is never asked for them.
        first = next((i for i, (start, _) in enumerate(places) if start >= begin), len(ids))
        last = next((i for i in range(first, len(ids)) if ids[i] in end_ids), None)
        if last is None:
            raise _unsafe(turn, "no end mark of the target follows it")
        end = places[last][1]
        if not _holds(whole[begin:end], message):
            raise _unsafe(turn, "its words are not where the template answers")
        if turn + 1 < len(messages) and end > _words(render, messages, turn + 1, whole):
            raise _unsafe(turn, "its end mark comes only after the next turn's words")
        mask[first : last + 1] = [True] * (last + 1 - first)
    return ids, mask


def _words(render: Render, messages: Sequence[Message], turn: int, whole: str) -> int:
    """Where the words of a turn begin in the whole: up to there, other words in their place change nothing."""
    other = render([*messages[:turn], {**messages[turn], "content": _OTHER_WORDS}, *messages[turn + 1 :]], False)
    if other.count(_OTHER_WORDS) != 1:
        raise _unsafe(turn, "the template does not show its words, or shows them twice")
    before = other[: other.index(_OTHER_WORDS)]
    if whole.startswith(before):
        return len(before)
    return next(i for i, (left, right) in enumerate(zip(whole + "\0", before, strict=False)) if left != right)


def _holds(span: str, message: Message) -> bool:
    """Whether a turn's span has its words; a template may drop reasoning, and words beside tool calls."""
    return bool(message.get("tool_calls")) or message["content"].split(_END_OF_REASONING)[-1].strip() in span


def _unsafe(turn: int, reason: str) -> UserError:
    said = f"the target's chat template gives no safe loss mask, message {turn + 1}: {reason}"
    mend = f"set data.regenerate=true (which needs none), or put {MARKS} in its chat_template.jinja"
    return UserError(f"{said}; {mend}")
