"""Drafts by any language model, as text: string-level exact match (SLEM, 2502.05202, training-free).

The draft reads the text so far in its own tokens and goes on with its most likely ones. What it says is text again, and
the target's tokenizer cuts it into the tokens that are proposed. They are chosen, not drawn, and verified like others,
at every temperature: a text that was cut otherwise than the target would is rejected, and nothing else depends on it.

Both vocabularies are used whole, where token-level intersection (``tli/``) has what they share. But text is cut anew
in every round, on the host, and drafts are made for one request after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_start import attention
from specdraft.drafters.text_drafter import TextDrafter
from specdraft.errors import UserError
from specdraft.targets import LanguageModel, Target, loading

_BROKEN = "\ufffd"  # of a character some of whose bytes are not there yet


@dataclass
class SlemState:
    """The target's ``tokens`` so far; the draft's ``read`` tokens, whose keys and values the ``cache`` has."""

    tokens: list[int]
    read: list[int] = field(default_factory=list)
    cache: StaticCache | None = None


class Slem(TextDrafter):
    """Drafts with the model and the tokenizer at ``model``, a directory or hub id."""

    reads_text_alone = False  # it asks for the target's tokenizer, too

    def __init__(self, model: str | None, revision: str | None = None, lookbehind: int = 10) -> None:
        """``lookbehind``: tokens before the draft that are cut anew together with it. Raises UserError without a model,
        and for a lookbehind below 1."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if model is None:
            raise UserError("string-level drafts need a model: expected drafter.model=PATH or a hub id")
        if lookbehind < 1:
            raise UserError(f"string-level drafts with lookbehind={lookbehind}: expected at least 1 token")
        self._arguments = arguments
        self.name, self.revision, self.lookbehind = model, revision, lookbehind

    def bind(self, target: Target) -> None:
        """Load the draft, on the target's device. Raises UserError if it cannot be, or the target has no tokenizer."""
        if self.target is target:
            return
        super().bind(target)
        if target.tokenizer is None:
            raise UserError("string-level drafts need the target's tokenizer: expected a target that has one")
        dtype = str(target.dtype).removeprefix("torch.")
        model, self.tokenizer = loading.load(self.name, self.revision, dtype, attention(target), False, what="draft")
        self.model = LanguageModel(model.to(target.device).eval().requires_grad_(False))
        self.model.check_logits()
        self.begins = self.tokenizer.encode("")  # what the draft's texts begin with
        self.ends = {self.tokenizer.eos_token_id}

    def start(self, prompt: list[int]) -> SlemState:
        """Nothing is read yet."""
        return SlemState(list(prompt))

    def extend(self, state: SlemState, tokens: list[int]) -> None:
        """Append what the target emitted."""
        state.tokens += tokens

    @torch.inference_mode()
    def propose(self, state: SlemState, length: int, after: Sequence[int] = ()) -> list[int]:
        """What ``length`` tokens of the draft say, in the target's; nothing behind half a character, and where the
        draft's context ends."""
        assert self.target is not None
        tokens = [*state.tokens, *after]
        text = _decoded(self.target.tokenizer, tokens)
        ids = self.begins + self.tokenizer.encode(text, add_special_tokens=False)
        if not ids or text.endswith(_BROKEN) or len(ids) + length > self.model.max_length:
            return []
        drafted = self._continue(state, ids, length)
        known = ids[-self.lookbehind :]
        before, whole = _decoded(self.tokenizer, known), _decoded(self.tokenizer, known + drafted)
        said = whole.removeprefix(before).partition(_BROKEN)[0] if whole.startswith(before) else ""
        return self._cut(tokens[-self.lookbehind :], said)[:length]

    def _cut(self, before: list[int], said: str) -> list[int]:
        """Text in the target's tokens, as cut behind the tokens ``before``; alone, where that would cut these anew."""
        assert self.target is not None
        tokenizer = self.target.tokenizer
        whole = tokenizer.encode(_decoded(tokenizer, before) + said, add_special_tokens=False)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return tokenizer.encode(said, add_special_tokens=False)

    def _continue(self, state: SlemState, ids: list[int], length: int) -> list[int]:
        """At most ``length`` of the draft's most likely tokens behind ``ids``, and none from an end on."""
        if state.cache is None or state.cache.places.capacity < len(ids) + length:
            state.cache, state.read = self.model.new_cache(1, 2 * (len(ids) + length)), []
        both = zip(state.read, ids, strict=False)
        same = next((place for place, (one, other) in enumerate(both) if one != other), min(len(state.read), len(ids)))
        held = min(same, len(ids) - 1)  # the last one is read for what follows it
        unread, drafted = ids[held:], list[int]()
        while len(drafted) < length:
            new = torch.tensor([unread], device=self.model.device)
            reading = Pass.text(new, torch.tensor([held], device=new.device), held, simple=True)
            held += len(unread)
            token = int(self.model.logits(self.model.step(reading, state.cache).last[:, -1]).argmax())
            if token in self.ends:
                break
            drafted.append(token)
            unread = [token]
        state.read = (ids + drafted)[:held]
        return drafted


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
