"""What becomes of logits before a token is chosen: everything that the settings ask for, in their order."""

import re

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.grammar import Grammar
from specdraft.decoding.processors import Processors
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.tree import DraftTrees
from specdraft.targets import Target
from tests.drafters.tli.two_tokenizers import byte_level
from tests.fakes import TargetAsDraft, tiny_llama

PROMPTS = [[60, 70, 80], [90, 61], [100, 72, 65, 66, 67]]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_level(["abc abacus cab bac cabab ababab abcabc"], 280)
    model = tiny_llama(len(tokenizer), initializer_range=0.3)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Target.from_model(model, tokenizer)


@pytest.fixture
def letters(tmp_path) -> Grammar:
    file = tmp_path / "answer.regex"
    file.write_text("[abc]{12}")
    return Grammar.of(str(file))


def test_nothing_is_done_where_nothing_is_asked_for(target):
    processors, trees = Processors(Sampling(), target, 1), DraftTrees.chains(torch.tensor([[1, 2]]))
    logits = torch.randn(1, 3, target.vocab_size)
    assert processors.begin(0, torch.tensor([1]), logits[:, 0]).equal(logits[:, 0])
    assert processors.apply(logits, trees) == (logits, trees)
    assert processors.masks_drafts is None


def test_penalties_and_a_grammar_together(target, letters):
    both = Sampling(repetition_penalty=5.0, presence_penalty=2.0, frequency_penalty=2.0, grammar=letters)
    plain = Decoder(target, sampling=both).generate_batch(PROMPTS, 20, 2)
    drafted = Decoder(target, TargetAsDraft(), 3, both).generate_batch(PROMPTS, 20, 2)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    alone = Decoder(target, sampling=Sampling(grammar=letters)).generate_batch(PROMPTS, 20, 2)
    assert all(re.fullmatch("[abc]{12}", target.tokenizer.decode(each.tokens[:-1])) for each in plain)
    # What was said is said again less often.
    repeated, free = (sum(len(e.tokens) - len(set(e.tokens)) for e in found) for found in (plain, alone))
    assert repeated < free


@pytest.mark.parametrize("masks_drafts", [True, False])
def test_whether_drafts_are_made_under_the_grammar(target, letters, masks_drafts):
    grammar = Grammar(letters.kind, letters.text, letters.name, masks_drafts)
    assert (Processors(Sampling(grammar=grammar), target, 1).masks_drafts is not None) == masks_drafts


def test_a_request_takes_the_place_of_another(target, letters):
    processors = Processors(Sampling(presence_penalty=2.0, grammar=letters), target, 2)
    logits = torch.zeros(1, target.vocab_size)
    a, b = (target.tokenizer.encode(letter)[0] for letter in "ab")
    for row, said in enumerate((a, b)):
        processors.begin(row, torch.tensor([60]), logits)
        processors.advance(torch.tensor([[said]]), torch.tensor([1]), row)
        processors.read(row, [said])
    processors.drop(0, 1)
    found, _ = processors.apply(logits[:, None], DraftTrees.chains(torch.empty((1, 0), dtype=torch.int64)))
    assert found[0, 0, a] == 0 and found[0, 0, b] == -2 and found[0, 0, 60] == -torch.inf
