"""Tokenizers that learned from different texts, and models that speak with them."""

import json
from collections.abc import Iterable, Sequence

import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from specdraft.targets import Target
from tests.fakes import tiny_llama

CODE = ["def add(left, right):\n    return left + right\n", "for number in range(left):\n    print(number)\n"]
PROSE = ["The number of words to the left is range enough.\n", "Add whatever returns to print, right or wrong.\n"]
ENDS = ["<|end|>", "<|begin|>"]


def byte_level(text: Iterable[str], size: int, special: Iterable[str] = ENDS, **options):
    """A byte-level BPE as most models have it; ``special`` come first."""
    words = Tokenizer(BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(text, trainer)
    given = {"eos_token": next(iter(special))} | options
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **given)


def sentence_piece(text: Iterable[str], size: int):
    """A BPE that spells a space as SentencePiece does, with an unknown token and two bytes."""
    words = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    trainer = BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<0x0A>", "<0x61>"], show_progress=False)
    words.train_from_iterator([line.replace("\n", " ") for line in text], trainer)
    content = json.loads(words.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # bytes are of the model's own vocabulary
    words = Tokenizer.from_str(json.dumps(content))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def characters_alone(characters: Sequence[str], order: Sequence[int] | None = None):
    """A tokenizer of these characters, as a byte-level one spells them, with their ids in this order."""
    words = Tokenizer(BPE(dict(zip(characters, order or range(len(characters)), strict=True)), []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def code_target(**options) -> Target:
    """A random target of 300 tokens that learned from code, and what it can be given."""
    tokenizer = byte_level(CODE, 300)
    return Target.from_model(tiny_llama(len(tokenizer), **options), tokenizer)


def save_prose_model(folder, tokenizer=None, **options) -> str:
    """A random model of another vocabulary, whose tokenizer learned from prose."""
    tokenizer = tokenizer or byte_level(PROSE, 290, ("<s>", "<|end|>"))
    tiny_llama(len(tokenizer), seed=5, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
