"""Sampling by what a target is published with, as engines do by default."""

import json

import pytest

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import served, shaped
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.drafters.tli.two_tokenizers import byte_level
from tests.fakes import tiny_llama


def published(**settings: object) -> Target:
    target = Target.from_model(tiny_llama())
    for name, value in settings.items():
        setattr(target.model.generation_config, name, value)
    return target


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Sampling(1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, Sampling(0.6, 20, 0.95)),
        ({"repetition_penalty": 1.05, "top_k": -1}, Sampling(1.0, repetition_penalty=1.05)),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.1}, Sampling(1.0, 0, 1.0, 1.0, 1.5, 0.1)),
        ({"temperature": 0.0, "min_p": 0.0}, Sampling()),
    ],
)
def test_what_is_said_holds_and_the_rest_is_neutral(settings, wanted):
    assert served(published(**settings)) == wanted


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_p": 0.05}, "min_p=0.05, which vLLM refuses beside drafts: expected numbers for the temperature"),
        ({"temperature": "hot"}, "generation_config.json has temperature='hot': expected a number; mend the file"),
        ({"top_p": float("nan")}, "has top_p=nan: expected a number"),
        ({"top_k": True}, "has top_k=True: expected a number"),
        ({"temperature": -1.0}, "in the target's generation_config.json temperature is -1.0: expected 0"),
    ],
)
def test_settings_that_cannot_be_served(settings, said):
    with pytest.raises(UserError, match=said):
        served(published(**settings))


def test_the_settings_of_a_saved_model_are_read(tmp_path):
    tokenizer = byte_level(["what it reads"], 260)
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(len(tokenizer)).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.7, "top_k": 40, "do_sample": True}))
    assert served(Target.load(str(tmp_path))) == Sampling(0.7, 40)


def test_what_is_given_holds_instead():
    assert shaped(Sampling(0.6, 20, 0.95), {"top_k": 0, "top_p": None}) == Sampling(0.6, 0, 0.95)


def test_sampling_as_a_reader_sees_it():
    assert str(Sampling()) == "temperature 0"
    assert str(Sampling(0.6, 20, 0.95, 1.05)) == "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05"
