"""Settings of an evaluation; greedy drafts above temperature 0 are as lossless as sampled ones."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding import rules
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.drafters.eagle import Eagle3
from specdraft.errors import UserError
from specdraft.evaluation.settings import EvaluationSettings, drafted
from specdraft.export.engine import GREEDY, SAMPLED
from specdraft.export.sglang import SGLang
from specdraft.export.tensorrt_llm import TensorRTLLM
from specdraft.export.transformers import Transformers
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities
from tests.fakes import tiny_llama

V, PROMPT, TWO = 6, [1, 4, 2], torch.tensor([6, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0: expected at least 1"),
        ({"num_draft_tokens": "many"}, "num_draft_tokens is many"),
        ({"num_draft_tokens": 5000}, "decoding.num_draft_tokens is 5000: expected at most 512 drafted tokens a round"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1: expected at least 2"),
        ({"temperature": []}, "empty list"),
        ({"temperature": ["hot"]}, "temperature is 'hot'"),
        ({"seed": "x"}, "seed is 'x': expected a whole number"),
        ({"temperature": [0.0, -1.0]}, "temperature is -1.0"),
        ({"mask_drafts": "no"}, "decoding.mask_drafts is no: expected true or false"),
        ({"truncate_drafts": "no"}, "decoding.truncate_drafts is no: expected true, false or engine"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"grammar": "answers.xml"}, "decoding.grammar is answers.xml: expected json, or the path of a file"),
        ({"drafting": "guessed"}, "drafting is 'guessed': expected engine, sampled or greedy"),
    ],
)
def test_bad_settings(options, said):
    config = {"num_draft_tokens": 5, "temperature": 0.0, "max_new_tokens": 8, "top_k": 0, "top_p": 1.0, **options}
    with pytest.raises(UserError, match=said):
        EvaluationSettings.from_config(config, config.pop("seed", 0))


def test_a_grammar_from_config():
    config = {"num_draft_tokens": 5, "temperature": 0.0, "max_new_tokens": 8, "top_k": 0, "top_p": 1.0}
    given = EvaluationSettings.from_config({**config, "grammar": "json", "mask_drafts": False}).sampling(0.0).grammar
    assert given.name == "json" and not given.masks_drafts
    assert EvaluationSettings.from_config(config).sampling(0.0).grammar is None


def test_settings_from_config():
    config = {"num_draft_tokens": 5, "max_new_tokens": 8, "top_k": 0, "top_p": 1.0}
    assert EvaluationSettings.from_config({**config, "temperature": 0.7}).temperatures == (0.7,)
    assert EvaluationSettings.from_config({**config, "temperature": [0.0, 1.0, 0.0]}, seed=2).temperatures == (0.0, 1.0)


def test_shape_and_rule_from_config():
    config = {"num_draft_tokens": 4, "max_new_tokens": 8, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    shape = {"_target_": "specdraft.decoding.shapes.DynamicTree", "depth": 4, "top_k": 2, "num_nodes": 6}
    rule = {"_target_": "specdraft.decoding.rules.Typical", "epsilon": 0.2, "delta": 0.4}
    settings = EvaluationSettings.from_config({**config, "shape": shape, "rule": rule})
    assert settings.shape == DynamicTree(4, 2, 6) and settings.rule == rules.Typical(0.2, 0.4)
    with pytest.raises(UserError, match="num_draft_tokens is 0"):  # checked before a shape reads it
        EvaluationSettings.from_config({**config, "num_draft_tokens": 0, "shape": {"_target_": "nowhere"}})


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (VLLM(), (GREEDY, SAMPLED)),
        (SGLang(), (GREEDY, SAMPLED)),
        (TensorRTLLM(), (GREEDY, SAMPLED)),
        (Transformers(), (SAMPLED, GREEDY)),
        (None, (SAMPLED,)),
    ],
)
def test_drafts_are_made_as_the_engine_makes_them_with_the_other_way_beside(engine, expected):
    settings = EvaluationSettings()
    assert settings.draftings(engine) == expected
    assert replace(settings, drafting=GREEDY).draftings(engine) == (GREEDY,)


@pytest.mark.parametrize(("engine", "truncates"), [(VLLM(), False), (Transformers(), True), (None, True)])
def test_drafts_are_truncated_as_by_the_engine(engine, truncates):
    settings = EvaluationSettings(temperatures=(0.0, 0.8), top_p=0.9)
    found = settings.drawn_as(engine).sampling(0.8)
    assert found == Sampling(0.8, top_p=0.9, truncates_drafts=truncates)
    assert found.of_drafts == Sampling(0.8, top_p=0.9 if truncates else 1.0, truncates_drafts=truncates)
    for said in (True, False):
        told = replace(settings, truncate_drafts=said)
        assert told.drawn_as(engine).sampling(0.8).truncates_drafts is said
    assert replace(settings, top_p=None).drawn_as(engine).sampling(0.8) == Sampling(0.8)  # nothing is left out


def test_the_shape_follows_the_drafting():
    chain = StaticTree.chain(3)
    assert drafted(chain, SAMPLED) == chain and drafted(chain, GREEDY) == StaticTree.chain(3, sampled=False)
    assert drafted(DynamicTree(), SAMPLED) == DynamicTree()  # always the most likely tokens


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama(V, seed=3, num_hidden_layers=4, initializer_range=0.25))


@pytest.fixture(scope="module")
def head(target):
    """Sure of what is often wrong: corrections matter as much as acceptances."""
    torch.manual_seed(4)
    head = Eagle3.for_target(target).eval()
    with torch.no_grad():
        head.lm_head.weight.mul_(3)
    return head


def two_tokens(target, head, sampling, rule=rules.rejection_sampling, count=600):
    """Second and third token of ``count`` texts, as second * V + third, and how many drafted tokens were accepted."""
    decoder = Decoder(target, head, drafted(StaticTree.chain(2), GREEDY), sampling, rule)
    generations = decoder.generate_batch([PROMPT] * count, 3, batch_size=100)
    pairs = torch.tensor([generation.tokens[1:3] for generation in generations]) @ TWO
    return pairs, sum(generation.accepted[0] for generation in generations)


def exact_pairs(target, sampling):
    """``[V, V]``: second and third token, summed over the first, by plain formulas from the model's own forward."""
    paths = torch.tensor([[*PROMPT, a, b] for a in range(V) for b in range(V)])
    logits = target.model(paths).logits
    first = plain_probabilities(logits[0, -3], sampling)
    pairs = torch.zeros(V, V, dtype=torch.float64)
    for (a, b), rows in zip(paths[:, -2:].tolist(), logits, strict=True):
        second, third = (plain_probabilities(row, sampling) for row in rows[-2:])
        pairs[b] += first[a] * second[b] * third
    return pairs


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.4, top_k=4)], ids=str)
def test_greedy_drafts_are_lossless_above_temperature_0(target, head, sampling):
    pairs, accepted = two_tokens(target, head, sampling)
    assert 200 < accepted < 1000  # of 1200: acceptances and corrections both shape the outcome
    assert goodness_of_fit(pairs, exact_pairs(target, sampling)) > REJECTED


def test_a_rule_that_takes_greedy_drafts_for_sampled_ones_is_rejected(target, head):
    """It accepts with p / q and a q below 1, too often."""

    def as_if_sampled(trees, p, uniform):
        drafted = p[:, :-1].gather(2, trees.tokens[..., None])[..., 0]
        accepted = trees.beneath(uniform[:, :-1] < drafted / 0.5).sum(-1)
        rows, path = torch.arange(len(p)), torch.arange(trees.num_nodes).expand_as(trees.tokens)
        rest, rejected = p[rows, accepted], torch.nn.functional.pad(trees.tokens, (0, 1))[rows, accepted]
        rest[accepted < trees.num_nodes] *= torch.nn.functional.one_hot(rejected, V)[accepted < trees.num_nodes] == 0
        return rules.Verdict(path, accepted, sample(rest, uniform[:, -1]))

    pairs, _ = two_tokens(target, head, Sampling(1.0), as_if_sampled)
    assert goodness_of_fit(pairs, exact_pairs(target, Sampling(1.0))) < REJECTED


def test_auto_chooses_the_length_of_chains_and_other_shapes_are_as_deep_as_usual():
    decoding = {"num_draft_tokens": "auto", "temperature": 0.0, "max_new_tokens": 8}
    chain = {"_target_": "specdraft.decoding.shapes.StaticTree.chain", "num_tokens": "auto"}
    settings = EvaluationSettings.from_config(decoding | {"shape": chain})
    assert settings.num_draft_tokens == "auto"
    assert settings.draft_shape(None, None) == StaticTree.chain(8)
    tree = {"_target_": "specdraft.decoding.shapes.DynamicTree", "depth": "auto"}
    settings = EvaluationSettings.from_config(decoding | {"shape": tree})
    assert settings.num_draft_tokens == 5 and settings.draft_shape(None, None) == DynamicTree(depth=5)
    early = chain | {"stop": {"_target_": "specdraft.decoding.stopping.Confidence"}}
    settings = EvaluationSettings.from_config(decoding | {"shape": early})
    assert settings.num_draft_tokens == 5
    assert settings.draft_shape(None, None) == StaticTree.chain(5, stop=Confidence())


@pytest.fixture
def served() -> Target:
    target = Target.from_model(tiny_llama())
    target.model.generation_config.temperature, target.model.generation_config.top_k = 0.6, 20
    return target


def test_as_the_target_is_served(served):
    config = {"num_draft_tokens": 4, "max_new_tokens": 8, "temperature": [0.0, "served"], "top_p": 0.9}
    settings = EvaluationSettings.from_config(config).known(served)
    assert settings.numbers == settings.temperatures == (0.0, 0.6)
    assert settings.sampling(0.6) == Sampling(0.6, 20, 0.9) and settings.sampling(0.0) == Sampling(0.0, 0, 0.9)
    assert settings.known(served) is settings


def test_what_engines_do_by_default_is_named_where_it_is_not_measured(served):
    config = {"num_draft_tokens": 4, "temperature": [0.0, 0.6]}
    settings = EvaluationSettings.from_config(config)
    assert settings.unmeasured(served) == "temperature 0.6, top_k 20"
    assert replace(settings, top_k=20).unmeasured(served) is None  # it is one of them
    assert EvaluationSettings(temperatures=("served",)).known(served).unmeasured(served) is None
    assert settings.unmeasured(Target.from_model(tiny_llama())) is None  # nothing is said
    served.model.generation_config.min_p = 0.1
    assert settings.unmeasured(served) is None


def test_a_temperature_is_told_apart_from_that_which_is_served(served):
    settings = EvaluationSettings.from_config({"num_draft_tokens": 4, "temperature": [0.6, "served"]})
    with pytest.raises(UserError, match=r"is \[0.6, 'served'\], and the target is served at 0.6: expected one of"):
        settings.known(served)
