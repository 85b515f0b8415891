"""The embedded target's tokenizer: byte-level BPE over Python source, with a chat template."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# The generation marks give transformers' own assistant mask: the answer and its end mark, nothing else.
_CHAT_TEMPLATE = (Path(__file__).parent / "tiny" / "chat_template.jinja").read_text("utf-8")
# Runs of digits are cut at three, line ends join the blanks before them, and an indentation is one piece.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on ``texts``; ids 0-5 are the special tokens, every byte sequence is encodable."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PIECES), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [BOS, EOS, PAD, *ROLES], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
