"""Which tokens of two tokenizers stand for the same text, whatever each of them spells it like.

V / Vm = vocabulary of the target / of the draft, Vs = shared tokens.

A byte-level tokenizer spells a space ``Ġ`` and every other byte as a character of its own, a SentencePiece one spells a
space ``▁`` and bytes without a character ``<0x0A>``. Compared is what they mean, as bytes. Added tokens (``<|end|>``)
mean what they are spelled like, to everybody."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel
from torch import Tensor

from specdraft.errors import UserError

LEAST = 0.1  # of the smaller vocabulary; byte-level tokenizers of any two languages have their 256 bytes in common
_BYTE_LEVEL, _SENTENCE_PIECE = "Ġ", "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class SharedTokens(NamedTuple):
    """target: ``[Vs]`` ascending ids of the target. draft: ``[Vs]`` the draft's ids of the same texts. unknown: what
    the draft reads in the place of any other token."""

    target: Tensor
    draft: Tensor
    unknown: int


def shared_tokens(target: Any, draft: Any, vocab_size: int, draft_vocab_size: int) -> SharedTokens:
    """The intersection of two tokenizers, of whose ids the models have ``vocab_size`` V and ``draft_vocab_size`` Vm.
    Raises UserError if too little is shared, or if the draft's has no token that could stand for all others."""
    theirs, ours = (texts(each, size) for each, size in ((target, vocab_size), (draft, draft_vocab_size)))
    both = sorted((number, ours[text]) for text, number in theirs.items() if text in ours)
    least = LEAST * min(len(theirs), len(ours))
    if not both or len(both) < least:
        found = f"the draft's tokenizer shares {len(both)} of its {len(ours)} tokens with the target's {len(theirs)}"
        mend = "choose a draft of a more similar tokenizer, or start=layers"
        raise UserError(f"{found}: expected at least {max(1, round(least))}; {mend}")
    ids = torch.tensor(both)
    return SharedTokens(ids[:, 0], ids[:, 1], _unknown(draft, draft_vocab_size))


def texts(tokenizer: Any, size: int) -> dict[bytes, int]:
    """What each id below ``size`` stands for. Of several ids of one text the lowest that is no lone byte."""
    added, marker = tokenizer.get_added_vocab(), space_marker(tokenizer)
    found: dict[bytes, int] = {}
    ranked = sorted((bool(_BYTE.fullmatch(token)), number, token) for token, number in tokenizer.get_vocab().items())
    for _, number, token in ranked:
        if number < size:
            found.setdefault(_meaning(token, None if token in added else marker), number)
    return found


def space_marker(tokenizer: Any) -> str | None:
    """The character that the tokenizer spells a space with; None: no particular one."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(" a", add_special_tokens=False))
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if tokens and tokens[0] == tokenizer.unk_token and normalizer is not None:
        tokens = [normalizer.normalize_str(" a")]  # a ``served_tokenizer`` need not hold that token
    first = tokens[0][:1] if tokens and tokens[0] else ""
    return first if first in (_BYTE_LEVEL, _SENTENCE_PIECE) else None


def served_tokenizer(tokens: SharedTokens, target: Any, draft_vocab_size: int) -> dict[str, bytes]:
    """The files of a draft's tokenizer in engines that compare tokens by their spelling (vLLM), by name: a list of its
    Vm ids, the shared ones spelled as the target spells them and all others as nobody does. It tokenizes no text."""
    names = [f"<outside {number}>" for number in range(draft_vocab_size)]
    spelled = target.convert_ids_to_tokens(tokens.target.tolist())
    for number, name in zip(tokens.draft.tolist(), spelled, strict=True):
        names[number] = name
    listed = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, names[tokens.unknown]))
    # vLLM asks how " a" is spelled to learn the target's space.
    listed.normalizer = normalizers.Replace(" ", space_marker(target) or " ")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": names[tokens.unknown]}
    return {"tokenizer.json": listed.to_str().encode(), "tokenizer_config.json": json.dumps(about, indent=2).encode()}


def tokenizer_files(tokenizer: Any) -> Mapping[str, bytes]:
    """What ``from_pretrained`` needs to load it again, by file name."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _unknown(tokenizer: Any, size: int) -> int:
    """As vLLM chooses it: the unknown token, or else the end."""
    for number in (tokenizer.unk_token_id, tokenizer.eos_token_id):
        if number is not None and number < size:
            return int(number)
    wrong = "the draft's tokenizer has no token for what it does not know"
    raise UserError(f"{wrong}: expected an unk_token or an eos_token; name one in its tokenizer_config.json")


def _meaning(token: str, marker: str | None) -> bytes:
    if marker == _BYTE_LEVEL and all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    if marker == _SENTENCE_PIECE:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SENTENCE_PIECE, " ").encode()
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """The byte of every character of byte-level tokenizers: printable Latin-1 means itself, and the others are
    the characters from 256 on, in order."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
