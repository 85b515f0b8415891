"""Tokens are compared by what they mean, and too few in common are refused."""

import pytest
import transformers

from specdraft.drafters.tli.tokens import served_tokenizer, shared_tokens, space_marker, texts, tokenizer_files
from specdraft.errors import UserError
from tests.drafters.drafts import tokenizer_of
from tests.drafters.tli.two_tokenizers import CODE, PROSE, byte_level, sentence_piece


@pytest.fixture(scope="module")
def code():
    return byte_level(CODE, 300)


@pytest.fixture(scope="module")
def prose():
    return byte_level(PROSE, 290, ("<s>", "<|end|>"))


def names(tokens, one, other):
    """What each of them calls the shared tokens."""
    ids = zip(tokens.target.tolist(), tokens.draft.tolist(), strict=True)
    return [(one.convert_ids_to_tokens(t), other.convert_ids_to_tokens(d)) for t, d in ids]


def test_byte_level_tokenizers_share_bytes_words_and_added_tokens(code, prose):
    tokens = shared_tokens(code, prose, len(code), len(prose))
    assert set(names(tokens, code, prose)) == {(name, name) for name in code.get_vocab().keys() & prose.get_vocab()}
    assert bool((tokens.target.diff() > 0).all()) and 256 < len(tokens.target) < len(prose)
    ends = code.eos_token_id, prose.convert_tokens_to_ids("<|end|>")
    assert ends[0] != ends[1] and ends in list(zip(tokens.target.tolist(), tokens.draft.tolist(), strict=True))
    assert tokens.unknown == prose.eos_token_id  # there is no unknown token


def test_a_space_a_newline_and_a_word_are_the_same_however_they_are_spelled(code):
    other = sentence_piece(CODE, 120)
    assert (space_marker(code), space_marker(other), space_marker(tokenizer_of(9))) == ("Ġ", "▁", None)
    tokens = shared_tokens(code, other, len(code), len(other))
    found = names(tokens, code, other)
    assert {("Ġ", "▁"), ("Ġright", "▁right"), ("Ċ", "<0x0A>"), ("def", "def")} <= set(found)
    assert ("a", "a") in found and ("a", "<0x61>") not in found  # a character comes before its byte
    assert tokens.unknown == other.unk_token_id
    for name, theirs in found:
        plain = code.convert_tokens_to_string([name])
        assert plain == {"<0x0A>": "\n"}.get(theirs, theirs.replace("▁", " "))


def test_a_character_of_two_bytes_is_one_text():
    one, other = byte_level(["äö äö äö"], 280), sentence_piece(["äö äö äö"], 40)
    assert "äö".encode() in texts(one, len(one)) and "äö".encode() in texts(other, len(other))


def test_ids_that_the_models_do_not_have_are_not_shared(code):
    tokens = shared_tokens(code, code, 280, 290)
    assert tokens.target.tolist() == tokens.draft.tolist() == list(range(280))


def test_tokenizers_of_little_in_common_are_refused(code):
    with pytest.raises(
        UserError, match=r"shares 0 of its 64 tokens with the target's 299: expected at least 6; choose"
    ):
        shared_tokens(code, tokenizer_of(64, "word"), 300, 64)
    words = [f"<|{number}|>" for number in range(3000)]
    one, other = (byte_level(CODE, 300 + 3000, [*words, kind], eos_token=kind) for kind in ("<a>", "<b>"))
    other.add_tokens([f"x{number}x" for number in range(10)])
    assert len(shared_tokens(one, other, len(one), len(other)).target) > 3000
    far = byte_level(CODE, 300 + 3000, [word.upper() + "!" for word in words])
    with pytest.raises(UserError, match=r"shares 29\d of its 3\d+ tokens .* expected at least 3\d\d"):
        shared_tokens(one, far, len(one), len(far))


def test_a_draft_that_has_nothing_for_what_it_does_not_know_is_refused(code, prose):
    nameless = byte_level(PROSE, 290, eos_token=None)
    with pytest.raises(UserError, match="no token for what it does not know: expected an unk_token or an eos_token"):
        shared_tokens(code, nameless, len(code), len(nameless))


@pytest.mark.parametrize("target", [byte_level(CODE, 300), sentence_piece(CODE, 120)], ids=["bytes", "pieces"])
def test_an_engine_that_compares_spellings_finds_the_same_pairs(target, prose, tmp_path):
    tokens = shared_tokens(target, prose, len(target), len(prose))
    for name, content in served_tokenizer(tokens, target, len(prose)).items():
        (tmp_path / name).write_bytes(content)
    listed = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = target.get_vocab()
    pairs = {(theirs[name], number) for name, number in listed.get_vocab().items() if name in theirs}
    assert pairs == set(zip(tokens.target.tolist(), tokens.draft.tolist(), strict=True))
    assert len(listed) == len(prose) and listed.unk_token_id == tokens.unknown
    marked = f"{space_marker(target)}a"
    assert listed.convert_ids_to_tokens(listed.encode(" a"))[0] == (
        marked if marked in listed.get_vocab() else listed.unk_token
    )


def test_a_tokenizers_files_make_it_again(prose, tmp_path):
    for name, content in tokenizer_files(prose).items():
        (tmp_path / name).write_bytes(content)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode(PROSE[0]) == prose.encode(PROSE[0]) and again.eos_token == prose.eos_token
