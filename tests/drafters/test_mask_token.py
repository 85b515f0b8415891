"""The token that stands at what is to be drafted is one that no text holds."""

from specdraft.drafters.mask_token import mask_token
from specdraft.targets.chat_template import bind_options
from specdraft.targets.loading import load_tokenizer
from tests.drafters.drafts import tokenizer_of


def test_an_id_beyond_the_tokenizer_comes_first():
    assert mask_token(tokenizer_of(64), 80) == 64
    assert mask_token(None, 80) == 79


def test_padding_that_means_nothing_else():
    tokenizer = load_tokenizer("embedded://tiny")
    assert mask_token(tokenizer, len(tokenizer)) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    assert mask_token(tokenizer, len(tokenizer)) == 2  # <|pad|> still: an added token that no template has


def test_an_added_token_that_the_template_does_not_know():
    tokenizer = tokenizer_of(64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|file|>", "<|other|>"]})
    tokenizer.chat_template = "<|turn|>{{ messages[0].content }}<|other|>"
    assert mask_token(tokenizer, len(tokenizer)) == tokenizer.convert_tokens_to_ids("<|file|>")
    tokenizer.chat_template += "{{ '<|fi' ~ 'le|>' if marked is defined }}"
    bind_options(tokenizer, {"marked": True})
    assert mask_token(tokenizer, len(tokenizer)) != tokenizer.convert_tokens_to_ids("<|file|>")
    assert mask_token(tokenizer_of(64), 64) == 0  # the unknown word
