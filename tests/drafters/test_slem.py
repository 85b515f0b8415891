"""Drafts as text: the target under another tokenizer is always right, half characters wait, and nothing is lossy."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree
from specdraft.drafters.slem import Slem
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.drafters.tli.two_tokenizers import CODE, characters_alone, code_target, save_prose_model, sentence_piece
from tests.fakes import tiny_llama, transformers_greedy

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


CHARACTERS = ["Ġ", *map(chr, range(33, 127))]


@pytest.fixture(scope="module")
def code() -> Target:
    return code_target(context=256)


def renumbered(folder) -> Target:
    """A target that reads characters; in ``folder`` the same model with the characters in another order."""
    size = len(CHARACTERS)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    model, other = (tiny_llama(size, 256, initializer_range=0.3) for _ in range(2))
    with torch.no_grad():
        other.get_input_embeddings().weight[order] = model.get_input_embeddings().weight
    other.save_pretrained(folder)
    characters_alone(CHARACTERS, order.tolist()).save_pretrained(folder)
    return Target.from_model(model, characters_alone(CHARACTERS))


def prompts_of(target: Target) -> list[list[int]]:
    return [target.tokenizer.encode(text) for text in ("def add(left", "for number in range(", CODE[0])]


def test_the_target_in_another_order_is_always_right(tmp_path):
    target = renumbered(tmp_path)
    prompt = target.tokenizer.encode("def add(left")
    assert Decoder(target, Slem(str(tmp_path)), 4).generate(prompt, 21).accepted == [4] * 4


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("shape", "pieces"), [(3, True), (DynamicTree(3, 3, 8), False)], ids=str)
def test_greedy_decoding_is_lossless(code, tmp_path, shape, batch_size, pieces):
    folder = save_prose_model(tmp_path, sentence_piece(CODE, 120) if pieces else None, context=256)
    prompts = prompts_of(code)
    results = Decoder(code, Slem(folder), shape).generate_batch(prompts, 16, batch_size)
    assert [result.tokens for result in results] == transformers_greedy(code.model, prompts, 16)
    assert sum(map(sum, (result.drafted for result in results))) > 0


class Says:
    """A draft whose continuation is known."""

    def __init__(self, tokenizer, text: str) -> None:
        self.ids = tokenizer.encode(text)

    def __call__(self, state, ids, length):
        return self.ids[:length]


@pytest.mark.parametrize(
    ("text", "said"), [("def add(left, right):", " return left"), ("def ad", "d(left"), ("def add(", "right é")]
)
def test_what_is_said_is_cut_by_the_target(code, tmp_path, monkeypatch, text, said):
    drafter = Slem(save_prose_model(tmp_path, context=256))
    drafter.bind(code)
    monkeypatch.setattr(drafter, "_continue", Says(drafter.tokenizer, said))
    proposed = drafter.propose(drafter.start(code.tokenizer.encode(text)), 30)
    assert code.tokenizer.decode(proposed) == said
    alone, whole = (code.tokenizer.encode(part) for part in (said, text + said))
    as_a_whole = whole[: -len(proposed)] == code.tokenizer.encode(text)
    assert as_a_whole != text.endswith("ad") and proposed == (whole[-len(proposed) :] if as_a_whole else alone)


def test_half_a_character_is_waited_for(code, tmp_path, monkeypatch):
    drafter = Slem(save_prose_model(tmp_path, context=256))
    drafter.bind(code)
    half = [*code.tokenizer.encode("def"), code.tokenizer.encode("é")[0]]
    assert drafter.propose(drafter.start(half), 3) == []
    said = drafter.tokenizer.encode("aé")
    monkeypatch.setattr(drafter, "_continue", lambda state, ids, length: said[:-1])
    assert code.tokenizer.decode(drafter.propose(drafter.start(half[:-1]), 3)) == "a"


def test_what_was_read_is_not_read_again(code, tmp_path, monkeypatch):
    drafter = Slem(save_prose_model(tmp_path, context=256))
    drafter.bind(code)
    widths, step = [], drafter.model.step
    monkeypatch.setattr(
        drafter.model, "step", lambda reading, cache: widths.append(reading.ids.shape[1]) or step(reading, cache)
    )
    state = drafter.start(code.tokenizer.encode("def add(left, right):"))
    first = drafter.propose(state, 3)
    assert drafter.propose(state, 3) == first, "a draft leaves the text as it was"
    assert widths[0] > 3 and widths[1:] == [1] * 5
    drafter.extend(state, code.tokenizer.encode("\n    return"))
    state.cache = None  # as where it has become too small
    again = drafter.start(state.tokens)
    assert drafter.propose(state, 3) == drafter.propose(again, 3)


def test_a_context_that_is_full_ends_the_drafts(code, tmp_path):
    drafter = Slem(save_prose_model(tmp_path, context=32))
    drafter.bind(code)
    assert drafter.propose(drafter.start(code.tokenizer.encode("a b c d e f g h")), 4)
    assert drafter.propose(drafter.start(code.tokenizer.encode("a b c d e f g h " * 2)), 4) == []


def test_what_cannot_be_is_refused(code, tmp_path):
    with pytest.raises(UserError, match=r"expected drafter.model=PATH or a hub id"):
        Slem(None)
    with pytest.raises(UserError, match="lookbehind=0: expected at least 1 token"):
        Slem("somewhere", lookbehind=0)
    with pytest.raises(UserError, match="there is no directory /nowhere"):
        Slem("/nowhere").bind(code)
    with pytest.raises(UserError, match="need the target's tokenizer"):
        Slem("somewhere").bind(Target.from_model(tiny_llama()))


def test_sampled_texts_are_those_of_a_request_alone(code, tmp_path):
    folder, prompts = save_prose_model(tmp_path, context=256), prompts_of(code)
    texts = [
        [result.tokens for result in Decoder(code, Slem(folder), 3, Sampling(1.0)).generate_batch(prompts, 12, size)]
        for size in (1, 3)
    ]
    assert texts[0] == texts[1]
