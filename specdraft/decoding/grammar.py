"""Answers that have to follow a grammar: which tokens may come next, for the target and for a draft alike.

B = requests, N = nodes of a draft, m = nodes, V = target vocabulary.

The target's distribution is masked after every node of a draft, so that what is emitted is what plain decoding under
the grammar emits: the same tokens at temperature 0, equally distributed ones above. A draft may be masked, too: it then
wastes no token on what the grammar forbids, and what the grammar dictates is drafted by anyone. Both are exact, as a
rule is given the q that was drawn from.

A grammar is walked on the host, by llguidance, which serving engines have among their backends: the device is read once
more per round, and where drafts are masked once more per level."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.errors import UserError

JSON = "json"
_KINDS = {".json": "a JSON schema", ".lark": "a Lark grammar", ".regex": "a regular expression"}
_BITS = 32  # tokens in a word of a mask
_ALL = -1  # a word in which all are allowed

Tokens = tuple[int, ...]
"""The tokens of a node and of all nodes above it, from the root down."""

_tokenizers: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # making one takes a second


class Speaker(Protocol):
    """What is asked of a target: see ``interfaces.py``."""

    vocab_size: int
    tokenizer: Any

    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def eos_token_ids(self) -> frozenset[int]: ...  # noqa: D102


@dataclass(frozen=True)
class Grammar:
    """What answers follow. kind: a suffix, which says what ``text`` is. name: for messages. masks_drafts: whether
    drafts are made under it."""

    kind: str
    text: str
    name: str
    masks_drafts: bool = True

    @classmethod
    def of(cls, setting: str, masks_drafts: bool = True) -> "Grammar":
        """From "json" (any JSON object) or the path of a .json (a JSON schema), .lark or .regex file. Raises UserError
        for anything else, for a file that is not there or is no such thing, and where llguidance is not installed."""
        path = Path(setting)
        if setting == JSON:
            found = cls(".json", '{"type": "object"}', JSON, masks_drafts)
        elif path.suffix in _KINDS:
            found = cls(path.suffix, _read(path, setting), path.name, masks_drafts)
        else:
            wanted = ", ".join(f"{kind} ({what})" for kind, what in _KINDS.items())
            raise UserError(f"decoding.grammar is {setting}: expected {JSON}, or the path of a file: {wanted}")
        wrong = found._error()
        if wrong:
            raise UserError(f"decoding.grammar is {setting}: expected {_KINDS[found.kind]}; {wrong}")
        return found

    def follow(self, target: Speaker, rows: int) -> "Followed":
        """Where up to ``rows`` requests that are decoded side by side stand in it. Raises UserError where it cannot be
        walked with the target's tokens."""
        library, tokenizer = _library(), _tokenizer(target)
        start = library.LLMatcher(tokenizer, self._compiled())
        if start.is_error():
            raise UserError(f"the grammar {self.name} cannot be followed by this target: {_line(start.get_error())}")
        return Followed(start, rows, target.vocab_size, target.device)

    def _error(self) -> str:
        """What is wrong with its text; empty if nothing is."""
        try:
            return _line(_library().LLMatcher.validate_grammar(self._compiled()))
        except ValueError as error:
            return _line(str(error))

    def _compiled(self) -> str:
        matcher = _library().LLMatcher
        if self.kind == ".json":
            return str(matcher.grammar_from_json_schema(self.text))
        if self.kind == ".lark":
            return str(matcher.grammar_from_lark(self.text))
        return str(matcher.grammar_from_regex(self.text.rstrip("\r\n")))  # what an editor adds


class Followed:
    """Where requests that are decoded side by side stand in a grammar, each in its row."""

    def __init__(self, start: Any, rows: int, vocab_size: int, device: torch.device) -> None:
        """start: llguidance's matcher where an answer begins."""
        self._start, self._rows = start, [start] * rows
        self.vocab_size, self.device = vocab_size, device

    def begin(self, row: int) -> None:
        """A request whose answer has no token yet."""
        self._rows[row] = self._start.deep_copy()

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens that were emitted, those behind the end of text included: nobody asks where they lead."""
        self._rows[row].try_consume_tokens(list(tokens))

    def drop(self, row: int, last: int) -> None:
        """Forget a request; the last one takes its row."""
        self._rows[row] = self._rows[last]

    def allowed(self, paths: Sequence[Sequence[Tokens]], first: int = 0) -> Tensor:
        """Bool ``[B, m, V]``: which tokens may come after each of the m paths of the requests from row ``first`` on.
        All may after a path that breaks the grammar, or ends it: no rule gets there."""
        masks = torch.full((len(paths), len(paths[0]), -(-self.vocab_size // _BITS)), _ALL, dtype=torch.int32)
        for index, of_request in enumerate(paths):
            for place, path in enumerate(of_request):
                matcher = self._rows[first + index].deep_copy()
                if matcher.try_consume_tokens(list(path)) == len(path):
                    word = masks[index, place]
                    matcher.unsafe_compute_mask_ptr(word.data_ptr(), word.numel() * word.element_size())
        bits = masks.to(self.device)[..., None] >> torch.arange(_BITS, device=self.device)
        return (bits & 1).bool().flatten(-2)[..., : self.vocab_size]

    def mask(self, logits: Tensor, trees: DraftTrees | None = None, first: int = 0) -> tuple[Tensor, Tensor]:
        """The target's logits ``[B, N + 1, V]`` after the last emitted token and after every node of ``trees`` (None:
        there are no nodes), with -inf where the grammar forbids a token; and bool ``[B, N]``, the nodes that it
        allows, given that it allows those above."""
        allowed = self.allowed(paths := _paths(trees, len(logits)), first)
        logits = logits.masked_fill(~allowed, -torch.inf)
        if trees is None:
            return logits, allowed.new_ones(len(paths), 0)
        index = torch.arange(len(logits), device=self.device)[:, None]
        return logits, allowed[index, trees.parents - ROOT, trees.tokens]


def _paths(trees: DraftTrees | None, rows: int) -> list[list[Tokens]]:
    """Of every request the path to the root, which is empty, and those to its nodes."""
    paths: list[list[Tokens]] = [[()] for _ in range(rows)]
    if trees is not None and trees.num_nodes:
        for own, pairs in zip(paths, torch.stack([trees.tokens, trees.parents], dim=-1).tolist(), strict=True):
            for token, parent in pairs:
                own.append((*own[parent - ROOT], token))
    return paths


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"decoding.grammar is {setting}, which cannot be read ({why}): check the path") from error


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        mend = "pip install 'specdraft[grammars]'"
        raise UserError(f"grammars are walked by the package llguidance, which is not installed: {mend}") from error


def _tokenizer(target: Speaker) -> Any:
    """The target's tokens as llguidance sees them."""
    if target.tokenizer not in _tokenizers:
        make = importlib.import_module("llguidance.hf").from_tokenizer
        try:
            made = make(target.tokenizer, n_vocab=target.vocab_size, eos_token=sorted(target.eos_token_ids) or None)
        except ValueError as error:
            raise UserError(f"grammars need a fast tokenizer, not this target's: {_line(str(error))}") from error
        _tokenizers[target.tokenizer] = made
    return _tokenizers[target.tokenizer]


def _line(text: str) -> str:
    """A message of the library in one short line."""
    return " ".join(text.split())[:200]
