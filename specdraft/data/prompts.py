"""Benchmark prompts: held-out functions of the standard library, a chat's of ten kinds, or a user's JSON Lines file.

Everything that can be wrong with a prompt is found before the first one is decoded."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.data.sources.base import Message
from specdraft.data.sources.chat_formats import FORMS, MalformedError, list_of, text_of
from specdraft.data.sources.records import Record, read_lines
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.chat import prompt_ids
from specdraft.errors import UserError, check_whole_number

STDLIB, CHAT = "python-stdlib", "chat"
_CHAT = Path(__file__).parents[1] / "embedded" / "chat.jsonl"  # 40 prompts of 10 categories, in turns
STDLIB_LIMIT, CHAT_LIMIT = 40, 10
ALL = sys.maxsize
_FORMS = 'one of "prompt" (text), "messages" (list of {"role", "content"}) or "turns" (list of texts)'


@dataclass(frozen=True)
class Prompt:
    """A conversation to continue: ``opening`` ends where the first answer begins, ``follow_ups`` are further user
    turns, each asked after the answer to the one before it, and ``origin`` says in messages where the prompt stands.
    ``answered``: an answer at its end was left out."""

    id: str
    category: str
    opening: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()
    origin: str = ""
    answered: bool = False


def load_prompts(benchmark: str, limit: int | None = None, logged: bool = False) -> list[Prompt]:
    """The prompts of ``python-stdlib``, of ``chat`` or of a ``.jsonl`` file, at most ``limit`` (default: 40 and 10 of
    them, all of a file). ``logged``: conversations may end with the assistant's messages, which are left out.
    Raises UserError for an unknown benchmark and for a missing, empty or malformed file."""
    if limit is not None:
        check_whole_number("limit", limit, 1, "prompts, or null for the usual number")
    if benchmark == STDLIB:
        found = PythonStdlib().prompts("test", limit or STDLIB_LIMIT)
        return [Prompt(c.id, c.category, c.prompt_messages, (), f"{STDLIB} {c.id}") for c in found]
    if benchmark != CHAT and not benchmark.endswith((".jsonl", ".json")):
        raise UserError(
            f"the benchmark {benchmark!r} is unknown: expected {STDLIB}, {CHAT} or the path of a .jsonl file"
        )
    try:
        prompts = [_prompt(record, logged) for record in read_lines(_CHAT if benchmark == CHAT else Path(benchmark))]
    except FileNotFoundError:
        raise UserError(f"the prompts file {benchmark} does not exist: check the path of benchmark=") from None
    except OSError as error:
        said = f"the prompts file {benchmark} cannot be read ({error.strerror})"
        raise UserError(f"{said}: expected JSON Lines") from error
    if not prompts:
        raise UserError(f"the prompts file {benchmark} is empty: expected one JSON object a line with {_FORMS}")
    return prompts[: limit or (CHAT_LIMIT if benchmark == CHAT else None)]


def at_most_per_category(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first ``limit`` prompts of every category, in their order; all without a limit."""
    seen = Counter[str]()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if limit is None or seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def categories_first(prompts: Sequence[Prompt]) -> list[int]:
    """The numbers of all prompts, those first that are the first of their category."""
    first = list({prompt.category: index for index, prompt in reversed(list(enumerate(prompts)))}.values())
    return sorted(first) + [index for index in range(len(prompts)) if index not in first]


def usual_benchmark(checkpoint: Mapping[str, Any], target: str | None = None) -> str:
    """The benchmark of the kind that a drafter learned from, by its checkpoint's configuration; without one, of the
    kind that a ``target`` was made for."""
    if not checkpoint and target is not None:
        return STDLIB if target.startswith("embedded://") else CHAT
    source = checkpoint.get("extra", {}).get("data", {}).get("source", PythonStdlib.name)
    return STDLIB if source == PythonStdlib.name else CHAT


def benchmark_questions(benchmark: str, own: str | None = None) -> list[str]:
    """All that the user asks in a benchmark, which training must not see. Raises UserError as ``load_prompts``.
    ``own`` is the benchmark that the source keeps out of training by itself: it gives no questions."""
    if benchmark == own:
        return []
    prompts = load_prompts(benchmark, ALL)
    asked = [message["content"] for prompt in prompts for message in prompt.opening if message["role"] == "user"]
    return asked + [question for prompt in prompts for question in prompt.follow_ups]


def encode(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the next answer begins, by the target's own chat template.
    A tokenizer without a template takes a lone message as plain text. Raises UserError for what cannot be rendered."""
    if getattr(tokenizer, "chat_template", None):
        return prompt_ids(tokenizer, messages)
    if len(messages) > 1:
        said = "the target's tokenizer has no chat template"
        raise UserError(f"{said}: it takes prompts of one message only, and this one has {len(messages)}")
    return list(tokenizer(messages[0]["content"])["input_ids"])


def check_lengths(tokenizer: Any, prompts: Sequence[Prompt], max_length: int, max_new_tokens: int) -> None:
    """Raise UserError unless there are prompts and each fits the context of ``max_length`` tokens.
    Of a conversation with follow-ups the longest possible history must fit, so that decoding cannot fail half-way."""
    if not prompts:
        raise UserError("there are no prompts to decode: expected at least one")
    too_long: list[tuple[Prompt, int]] = []
    for prompt in prompts:
        messages = list(prompt.opening)
        for question in prompt.follow_ups:
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": question}]
        try:
            length = len(encode(tokenizer, messages)) + max_new_tokens * len(prompt.follow_ups)
        except UserError as error:
            raise UserError(f"{prompt.origin}: {error}") from error
        if length < 1:
            raise UserError(f"{prompt.origin}: the prompt has no tokens; expected text")
        if length >= max_length:
            too_long.append((prompt, length))
    if too_long:
        first, length = too_long[0]
        answers = " (earlier answers at their longest included)" if first.follow_ups else ""
        raise UserError(
            f"{len(too_long)} of {len(prompts)} prompts do not fit the target's context of {max_length} tokens with "
            f"room for an answer; the first is {first.origin} with {length} tokens{answers}, the longest has "
            f"{max(length for _, length in too_long)}: shorten or remove them"
        )


def _prompt(record: Record, logged: bool) -> Prompt:
    origin, fields = record.origin, record.fields
    if record.error:
        raise UserError(f"{origin} is {record.error}: expected an object with {_FORMS}")
    forms = [form for form in ("prompt", "messages", "turns") if form in fields]
    if len(forms) != 1:
        found = f"has {' and '.join(forms)}" if forms else f"has only the keys {sorted(fields)}"
        raise UserError(f"{origin} {found}: expected exactly {_FORMS}")
    follow_ups: list[str] = []
    try:
        if forms[0] == "messages":
            opening = FORMS["messages"](fields)
        else:
            turns = [{"turn": turn} for turn in list_of(fields, "turns")] if forms[0] == "turns" else []
            first, *follow_ups = [text_of(turn, "turn") for turn in turns] or [text_of(fields, "prompt")]
            opening = [{"role": "user", "content": first}]
    except MalformedError as error:
        raise UserError(f"{origin}: {error}; expected {_FORMS}") from error
    said = len(opening)
    while logged and len(opening) > 1 and opening[-1]["role"] == "assistant":
        opening = opening[:-1]
    if opening[-1]["role"] == "assistant":
        raise UserError(f"{origin}: the last message is the assistant's; expected one that the target can answer")
    identity = fields.get("id", fields.get("question_id", record.line.number if record.line else ""))
    category = str(fields.get("category") or "uncategorized")
    return Prompt(str(identity), category, tuple(opening), tuple(follow_ups), origin, len(opening) < said)
