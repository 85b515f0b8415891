"""Levels of a draft under a grammar."""

import pytest
import torch

from specdraft.decoding.grammar import Followed, Grammar
from specdraft.drafters.constrained import Constrained
from specdraft.drafters.draft_tree_builder import Level, Vocabulary
from specdraft.targets import Target
from tests.drafters.tli.two_tokenizers import byte_level
from tests.fakes import tiny_llama


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_level(["abc cab"], 258)  # single bytes
    return Target.from_model(tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id), tokenizer)


@pytest.fixture
def letters(target) -> dict[str, int]:
    return {letter: target.tokenizer.encode(letter)[0] for letter in "abcdx"}


@pytest.fixture
def followed(target, tmp_path) -> Followed:
    """Two requests, the second one behind its first letter."""
    (tmp_path / "answer.regex").write_text("a(b|c)d|x[abcdx]{4}")
    found = Grammar.of(str(tmp_path / "answer.regex")).follow(target, 2)
    for row in range(2):
        found.begin(row)
    found.advance(1, target.tokenizer.encode("x"))
    return found


def test_every_node_is_masked_by_its_own_path(target, letters, followed):
    a, b, c, d, x = letters.values()
    size = target.vocab_size
    levels = []
    walk = Constrained(followed, 0, Vocabulary(size), lambda level: levels.append(level) or torch.zeros(2, 2, size))

    def open_to(logits):
        return [[set((node == 0).nonzero()[:, 0].tolist()) for node in request] for request in logits]

    assert open_to(walk.start(torch.zeros(2, size))[:, None]) == [[{a, x}], [{a, b, c, d, x}]]
    first = Level(torch.tensor([[a, x], [a, b]]), torch.zeros(2, 2, dtype=torch.int64), 1, 0, None)
    assert open_to(walk.extend(first)) == [[{b, c}, {a, b, c, d, x}], [{a, b, c, d, x}] * 2]
    second = Level(torch.tensor([[b, a], [a, b]]), torch.tensor([[0, 1], [0, 0]]), 2, 2, None)
    assert open_to(walk.extend(second)) == [[{d}, {a, b, c, d, x}], [{a, b, c, d, x}] * 2]
    assert levels == [first, second]


def test_rows_from_another_one_on(target, letters, followed):
    walk = Constrained(followed, 1, Vocabulary(target.vocab_size), lambda level: torch.zeros(1, 1, target.vocab_size))
    assert (walk.start(torch.zeros(1, target.vocab_size)) == 0).sum() == 5


def test_a_vocabulary_of_its_own(letters, target, followed):
    a, b, c, _, x = letters.values()
    walk = Constrained(
        followed, 0, Vocabulary(target.vocab_size, torch.tensor([c, x, b])), lambda level: torch.zeros(2, 1, 3)
    )
    assert walk.start(torch.zeros(2, 3)).tolist() == [[-torch.inf, 0, -torch.inf], [0, 0, 0]]
    # After "ab" only "d" may come, which it has not: it drafts what it likes.
    walk.extend(Level(torch.tensor([[a], [a]]), torch.zeros(2, 1, dtype=torch.int64), 1, 0, None))
    found = walk.extend(Level(torch.tensor([[b], [b]]), torch.zeros(2, 1, dtype=torch.int64), 2, 1, None))
    assert (found == 0).all()
