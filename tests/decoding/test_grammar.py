"""Decoding under a grammar: what plain decoding with the same masks emits, whatever is drafted and however."""

import importlib
import json
import re

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.grammar import Grammar
from specdraft.decoding.processors import Processors
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.ensemble import Ensemble
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities
from tests.drafters.tli.two_tokenizers import byte_level
from tests.fakes import TargetAsDraft, tiny_llama

TEXT = ["abc abacus cab bac cabab ababab abcabc", '{"name": "a", "size": 12}'] * 9
REGEX = "[ab]{4,6}c?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cab"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPTS = [[60, 70, 80], [90, 61], [100, 72, 65, 66, 67], [61, 62, 63, 64]]
CHAIN, DYNAMIC = StaticTree.chain(3), DynamicTree(3, 3, 8)
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SURE = StaticTree.chain(4, stop=Confidence(0.2))


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_level(TEXT, 280)
    model = tiny_llama(len(tokenizer) + 7, initializer_range=0.3)  # a few ids that no token has
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Target.from_model(model, tokenizer)


@pytest.fixture
def of(tmp_path):
    """A grammar of the text, in a file of the kind."""

    def build(text: str, kind: str = ".regex", masks_drafts: bool = True) -> Grammar:
        file = tmp_path / f"answer{kind}"
        file.write_text(text)
        return Grammar.of(str(file), masks_drafts)

    return build


def may_begin(text: str) -> bool:
    """Whether some text that ``REGEX`` matches begins so."""
    return re.fullmatch("[ab]{0,6}|[ab]{4,6}c", text) is not None


def allowed(target: Target, tokens: list[int]) -> list[int]:
    """Token by token, what may follow."""
    text = target.tokenizer.decode(tokens)
    found = [token for token in range(1, len(target.tokenizer)) if may_begin(text + target.tokenizer.decode([token]))]
    return found + [target.tokenizer.eos_token_id] * (re.fullmatch(REGEX, text) is not None)


def masked_logits(target: Target, prompt: list[int], tokens: list[int]):
    logits = target.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
    masked = torch.full_like(logits, -torch.inf)
    masked[allowed(target, tokens)] = logits[allowed(target, tokens)]
    return masked


def plainly(target: Target, prompt: list[int]) -> list[int]:
    """Greedy decoding under ``REGEX`` with the model's own forward."""
    tokens: list[int] = []
    while target.tokenizer.eos_token_id not in tokens:
        tokens.append(int(masked_logits(target, prompt, tokens).argmax()))
    return tokens


def test_plain_decoding_takes_the_best_token_that_may_come(target, of):
    decoder = Decoder(target, sampling=Sampling(grammar=of(REGEX)))
    for prompt in PROMPTS:
        assert decoder.generate(prompt, 20).tokens == plainly(target, prompt)


@pytest.mark.parametrize("shape", [CHAIN, TREE, DYNAMIC, SURE], ids=["chain", "tree", "dynamic", "sure"])
@pytest.mark.parametrize("masks_drafts", [True, False])
@pytest.mark.parametrize("kind", ["head", "hybrid", "ensemble", "lookup"])
def test_greedy_drafting_emits_the_tokens_of_plain_decoding(target, of, untrained, kind, masks_drafts, shape):
    head = untrained(target)
    drafters = {
        "head": head,
        "hybrid": Hybrid(head, PromptLookup()),
        "ensemble": Ensemble([head, NgramCache()]),
        "lookup": PromptLookup(),
    }
    sampling = Sampling(grammar=of(json.dumps(SCHEMA), ".json", masks_drafts))
    drafted = Decoder(target, drafters[kind], shape, sampling).generate_batch(PROMPTS, 40, 3)
    plain = Decoder(target, sampling=sampling).generate_batch(PROMPTS, 40, 3)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    for each in plain:
        if each.tokens[-1] == target.tokenizer.eos_token_id:
            assert set(json.loads(target.tokenizer.decode(each.tokens[:-1]))) == {"name", "size"}


def test_answers_end_as_their_grammar_does(target, of):
    sampling = Sampling(1.0, grammar=of(REGEX))
    found = Decoder(target, sampling=sampling).generate_batch(PROMPTS * 4, 20, 4)
    for each in found:
        assert each.tokens[-1] == target.tokenizer.eos_token_id
        assert re.fullmatch(REGEX, target.tokenizer.decode(each.tokens[:-1]))


def exact_pairs(target: Target, sampling: Sampling) -> torch.Tensor:
    """The joint distribution of the first two tokens under ``REGEX``."""
    size = target.vocab_size
    pairs = torch.zeros(size, size, dtype=torch.float64)
    first = plain_probabilities(masked_logits(target, PROMPTS[0], []), sampling)
    for token in first.nonzero()[:, 0].tolist():
        pairs[token] = first[token] * plain_probabilities(masked_logits(target, PROMPTS[0], [token]), sampling)
    return pairs


@pytest.mark.parametrize("shape", [CHAIN, TREE, SURE], ids=["chain", "tree", "sure"])
@pytest.mark.parametrize("masks_drafts", [True, False])
def test_sampled_drafts_are_distributed_as_plain_decoding(target, of, untrained, masks_drafts, shape):
    sampling = Sampling(1.0, grammar=of(REGEX, masks_drafts=masks_drafts))
    found = Decoder(target, untrained(target), shape, sampling).generate_batch([PROMPTS[0]] * 800, 3, 100)
    pairs = torch.tensor([each.tokens[:2] for each in found]) @ torch.tensor([target.vocab_size, 1])
    assert goodness_of_fit(pairs, exact_pairs(target, sampling)) > REJECTED


def test_a_target_that_is_masked_at_the_root_alone_is_found_out(target, of, untrained, monkeypatch):
    sampling = Sampling(1.0, grammar=of(REGEX))
    exact = exact_pairs(target, sampling)
    monkeypatch.setattr(Processors, "apply", lambda self, logits, trees: (logits, trees))
    found = Decoder(target, untrained(target), 3, sampling).generate_batch([PROMPTS[0]] * 800, 3, 100)
    pairs = torch.tensor([each.tokens[:2] for each in found]) @ torch.tensor([target.vocab_size, 1])
    assert goodness_of_fit(pairs, exact) < REJECTED


def test_a_masked_draft_is_accepted_where_the_grammar_dictates(target, of, untrained):
    """And one that is made without it is not, so that masking is what does it."""
    lengths = {}
    for masks_drafts in (True, False):
        sampling = Sampling(grammar=of("ab cab ab (c|d)", masks_drafts=masks_drafts))
        found = Decoder(target, untrained(target), 3, sampling).generate(PROMPTS[0], 30)
        lengths[masks_drafts] = sum(found.accepted) / len(found.accepted)
        assert re.fullmatch("ab cab ab (c|d)", target.tokenizer.decode(found.tokens[:-1]))
    assert lengths[True] > 2 * lengths[False]
    # What looks drafts up has no distribution that could be masked, and is exact all the same.
    plain = Decoder(target, sampling=sampling).generate(PROMPTS[0], 30).tokens
    assert Decoder(target, TargetAsDraft(), 3, sampling).generate(PROMPTS[0], 30).tokens == plain


def test_what_may_follow_every_node_of_a_tree(target, of):
    followed = of(REGEX).follow(target, 2)
    followed.begin(1)
    a, b, c = (target.tokenizer.encode(letter)[0] for letter in "abc")
    followed.advance(1, [a, b])
    trees = DraftTrees(torch.tensor([[a, c, b, a]]), torch.tensor([[ROOT, ROOT, 0, 2]]), depth=3)
    logits = torch.zeros(1, 5, target.vocab_size)
    (found,), may_come = followed.mask(logits, trees, first=1)
    assert may_come.tolist() == [[True, False, True, True]]
    for place, path in enumerate(([], [a], None, [a, b], [a, b, a])):
        wanted = range(target.vocab_size) if path is None else allowed(target, [a, b, *path])
        assert (found[place] == 0).nonzero()[:, 0].tolist() == sorted(wanted)


def test_what_comes_behind_the_end_of_text_is_not_asked(target, of):
    followed = of(REGEX).follow(target, 1)
    followed.begin(0)
    a, end = target.tokenizer.encode("a")[0], target.tokenizer.eos_token_id
    path = (a, a, a, a)
    found = followed.allowed([[path, (*path, end), (*path, end, a)]])
    assert found[0, 0].sum() > 1 and found[0, 0, end]
    assert found[0, 2].all()  # nothing is there to be asked for


@pytest.mark.parametrize(
    ("setting", "text", "wanted"),
    [
        ("yaml", None, "expected json, or the path of a file"),
        ("missing.json", None, r"missing.json, which cannot be read \(No such file or directory\): check the path"),
        ("bad.json", "{", "expected a JSON schema"),
        ("bad.json", '{"type": "colour"}', "expected a JSON schema"),
        ("bad.lark", "start: [", "expected a Lark grammar"),
        ("bad.regex", "(", "expected a regular expression"),
    ],
)
def test_a_setting_that_is_no_grammar(tmp_path, monkeypatch, setting, text, wanted):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / setting).write_text(text)
    with pytest.raises(UserError, match=wanted) as caught:
        Grammar.of(setting)
    assert setting in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"specdraft\[grammars\]"):
        Grammar.of("json")


def test_a_target_whose_tokens_cannot_be_read(of):
    class Slow:
        pass

    target = Target.from_model(tiny_llama(), Slow())
    with pytest.raises(UserError, match="fast tokenizer"):
        of(REGEX).follow(target, 1)
