"""A trace must tell what was decoded: its tokens are the generation's, its counts the generation's."""

from itertools import chain

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.trace import ACCEPTED, BONUS, CORRECTED, OWN, REJECTED, Round, SegmentStream, Trace, segments
from specdraft.decoding.tree import ROOT, DraftTrees, empty
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target
from tests.decoding.trees import chain_of, tree_of
from tests.fakes import tiny_llama


def test_a_tree_shows_the_accepted_path_and_where_it_would_have_gone():
    #      ROOT -> 10 -> 12        node 1 (token 11) is the second choice; its first child is node 3 (13), then 5 (15)
    #           -> 11 -> 13 -> 15
    #                 -> 14
    tree = tree_of(range(10, 16), [ROOT, ROOT, 0, 1, 1, 3])
    assert Round.of(tree, 0, [1], 99) == Round([11, 13, 15], 1, 99)
    assert Round.of(tree, 0, [1, 4], 99) == Round([11, 14], 2, 99)
    assert Round.of(tree, 0, [], 99) == Round([10, 12], 0, 99)
    assert Round.of(empty(1, torch.device("cpu")), 0, [], 7) == Round([], 0, 7)


def test_a_round_is_of_one_request_and_shows_its_drafts_alone():
    trees = DraftTrees.join([chain_of([5, 6, 7]), tree_of([8, 9], [ROOT, ROOT]), empty(1, torch.device("cpu"))])
    assert Round.of(trees, 0, [0], 99) == Round([5, 6, 7], 1, 99)
    assert Round.of(trees, 1, [1], 99) == Round([9], 1, 99)
    assert Round.of(trees, 1, [], 99) == Round([8], 0, 99)
    assert Round.of(trees, 2, [], 99) == Round([], 0, 99)
    cut = trees.truncate(torch.tensor([2, 0, 5]))
    assert Round.of(cut, 0, [0], 99) == Round([5, 6], 1, 99)
    assert Round.of(cut, 1, [], 99) == Round([], 0, 99)


@pytest.mark.parametrize("shape", [3, StaticTree(((0,), (1,), (0, 0), (1, 0)))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_is_the_generation(shape, temperature):
    target = Target.from_model(tiny_llama())
    decoder = Decoder(target, PromptLookup(), shape, Sampling(temperature), trace=True)
    results = decoder.generate_batch([[5, 6, 7, 5, 6], [9, 9, 9]], 20, batch_size=2)
    for prompt, result in zip([[5, 6, 7, 5, 6], [9, 9, 9]], results, strict=True):
        trace = result.trace
        assert trace.prompt == prompt
        assert trace.tokens[: len(result.tokens)] == result.tokens and len(result.tokens) == 20
        assert [each.accepted for each in trace.rounds] == result.accepted
        assert all(len(each.drafted) >= each.accepted for each in trace.rounds)
    assert Decoder(target).generate([1, 2], 4).trace is None


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128)


def test_segments_are_the_answer(tokenizer):
    ids = tokenizer("def add(a, b):\n    return a + b\n").input_ids
    wrong = tokenizer("xyz").input_ids
    trace = Trace(
        [1], ids[0], [Round([*ids[1:4], *wrong], 3, ids[4]), Round(wrong, 0, ids[5]), Round(ids[6:], len(ids) - 6, 0)]
    )
    found = segments(trace, len(ids), tokenizer)
    assert "".join(segment.text for segment in found if segment.status != REJECTED) == tokenizer.decode(ids)
    assert [segment.status for segment in found] == [OWN, ACCEPTED, REJECTED, CORRECTED, REJECTED, CORRECTED, ACCEPTED]
    assert {segment.text for segment in found if segment.status == REJECTED} == {"xyz"}
    assert len(segments(trace, 3, tokenizer)) == 2  # cut inside the first round: nothing after the cut


def test_the_targets_own_tokens_say_what_became_of_the_draft_before_them():
    trace = Trace([1], 2, [Round([3, 4], 1, 5), Round([6, 7], 2, 8), Round([], 0, 9), Round([3], 0, 4)])
    assert [(each.text, each.status) for each in segments(trace, 8, None)] == [
        ("2 ", OWN),
        ("3 ", ACCEPTED),
        ("4 ", REJECTED),
        ("5 ", CORRECTED),
        ("6 7 ", ACCEPTED),
        ("8 ", BONUS),
        ("9 ", OWN),
        ("3 ", REJECTED),
        ("4 ", CORRECTED),
    ]


@pytest.mark.parametrize("shape", [3, StaticTree(((0,), (1,), (0, 0), (1, 0)))])
def test_segments_read_while_decoding_are_those_of_the_end(shape, tokenizer):
    target = Target.from_model(tiny_llama(300))
    decoder = Decoder(target, PromptLookup(), shape, trace=True)
    stream, found, tokens = SegmentStream(tokenizer), [], []
    for generation in decoder.watch([5, 6, 7, 5, 6], 40):
        assert len(generation.tokens) > len(tokens)  # after every round
        tokens = list(generation.tokens)
        found.append(stream.read(generation.trace, len(tokens)))
    whole = decoder.generate([5, 6, 7, 5, 6], 40)
    assert tokens == whole.tokens and len(found) == 1 + len(whole.accepted) > 5
    assert [*chain.from_iterable(found)] == segments(whole.trace, len(whole.tokens), tokenizer)
    assert stream.read(whole.trace, len(whole.tokens)) == []


def test_half_a_character_waits_for_its_other_half(tokenizer):
    ids = tokenizer("é€").input_ids
    assert len(ids) > 2  # bytes
    trace = Trace([1], ids[0], [Round(ids[1:], len(ids) - 1, 0)])
    assert "".join(segment.text for segment in segments(trace, len(ids), tokenizer)) == "é€"
    single = Trace([1], ids[0], [Round([], 0, token) for token in ids[1:]])
    assert "".join(segment.text for segment in segments(single, len(ids), tokenizer)) == "é€"


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer as Llama 2 has it: spaces are signs that open words, and unknown characters are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    model = models.BPE({word: place for place, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("text", ["a b  ab bab é€ a", "a b " * 60 + "😀€" * 50 + " ab", "€ 😀 a " * 50])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_spaces_and_bytes_of_sentencepiece(sentencepiece, text, tokens):
    """Characters of three and four bytes lie across every place where the beginning of a text is forgotten."""
    ids = sentencepiece(text, add_special_tokens=False).input_ids
    drafts = [ids[at : at + tokens] for at in range(1, len(ids), tokens)]
    trace = Trace([], ids[0], [Round(draft[:-1], len(draft) - 1, draft[-1]) for draft in drafts])
    shown = "".join(segment.text for segment in segments(trace, len(ids), sentencepiece))
    assert shown == sentencepiece.decode(ids) == text


def test_a_long_text_is_shown_whole_however_it_is_cut(tokenizer):
    """Of a long text only the last tokens are decoded again."""
    ids = [*tokenizer("def add(a, b):\n    return a + b\n" * 40, add_special_tokens=False)["input_ids"]]
    ids += [*tokenizer("é€" * 60, add_special_tokens=False)["input_ids"]]
    rounds = [Round([*ids[at : at + 2], 5], 2, ids[at + 2]) for at in range(1, len(ids) - 3, 3)]
    trace, length = Trace([], ids[0], rounds), 1 + 3 * len(rounds)
    found = segments(trace, length, tokenizer)
    assert length > 400
    shown = "".join(segment.text for segment in found if segment.status != REJECTED)
    assert shown == tokenizer.decode(ids[:length], skip_special_tokens=True).rstrip("\ufffd")
