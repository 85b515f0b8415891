"""Options of a target's chat template, as Qwen3's ``enable_thinking``: bound to the tokenizer once, where the target is
loaded, so that whoever renders a conversation renders it with them, and whoever names what was rendered names them."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdraft.errors import UserError
from specdraft.text import fingerprint

BOUND = "_specdraft_chat_template_options"
_EXAMPLE = "target.chat_template_options='{enable_thinking: false}'"
_OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def template_hash(tokenizer: Any) -> str | None:
    """A hash of the chat template: another template in serving than in training lowers acceptance silently."""
    template = getattr(tokenizer, "chat_template", None)
    return fingerprint(template) if template else None


def options_of(tokenizer: Any) -> dict[str, Any]:
    """The options that every conversation is rendered with; empty without any."""
    return dict(getattr(tokenizer, BOUND, None) or {})


def checked_options(options: Any, name: str = "target.chat_template_options") -> dict[str, Any]:
    """Options as plain values; None has none. Raises UserError for what is no mapping of names to JSON's values, and
    for what rendering sets itself, as ``tools``."""
    plain = {} if options is None else _plain(options)
    if not isinstance(plain, Mapping) or not all(isinstance(key, str) and key.isidentifier() for key in plain):
        raise UserError(f"{name} is {plain!r}: expected names and values, as in {_EXAMPLE}")
    try:
        json.dumps(dict(plain), allow_nan=False)
    except (TypeError, ValueError) as error:
        wanted = f"texts, numbers, true, false, null, and lists and mappings of these, as in {_EXAMPLE}"
        raise UserError(f"{name} is {dict(plain)!r}, which JSON does not hold: expected {wanted}") from error
    if taken := sorted(_OURS & plain.keys()):
        raise UserError(f"{name} sets {taken[0]}, which every rendering sets itself: expected it left out")
    return dict(plain)


def _plain(value: Any) -> Any:
    """Mappings and lists of whatever kind, as OmegaConf's, as Python's own. vLLM's environment has no OmegaConf."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def bind_options(tokenizer: Any, options: Any) -> None:
    """Have all conversations rendered with ``options``. Raises UserError as ``checked_options``, and for an option that
    the template does not name: a template ignores it without a word, and so does an engine."""
    bound = checked_options(options)
    template = getattr(tokenizer, "chat_template", None)
    if bound and not template:
        said = "the target's tokenizer has no chat template, and target.chat_template_options gives it"
        raise UserError(f"{said} {', '.join(bound)}: expected none, or a chat_template.jinja in the target's directory")
    # A tokenizer with several templates has them by their names.
    source = "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")
    for name in bound:
        if not re.search(rf"\b{name}\b", source):
            wanted = "the name of one that it reads; target.chat_template_options={} sets none"
            raise UserError(f"the target's chat template names no option {name!r}: expected {wanted}")
    if bound:
        setattr(tokenizer, BOUND, bound)


def in_words(options: Mapping[str, Any] | None) -> str:
    """Options for a sentence."""
    return f"the chat template's options {json.dumps(options)}" if options else "no options of the chat template"
