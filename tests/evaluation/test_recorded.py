"""How was sampled, as evaluation.json holds it."""

import json
from dataclasses import replace

from specdraft.decoding.sampling import Sampling
from specdraft.evaluation.recorded import describe, sampling_of, to_record
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.targets import Target
from tests.fakes import tiny_llama


def test_what_is_written_is_read_again():
    target = Target.from_model(tiny_llama())
    target.model.generation_config.temperature, target.model.generation_config.repetition_penalty = 0.6, 1.05
    settings = EvaluationSettings(temperatures=(0.0, "served")).known(target)
    written = json.loads(json.dumps({"sampling": to_record(settings)}))
    for temperature in settings.numbers:
        assert sampling_of(written, temperature) == settings.sampling(temperature)
    assert describe(written, 0.6) == "temperature 0.6, repetition_penalty 1.05, as the target is served"
    assert describe(written, 0.0) == "temperature 0"
    other = EvaluationSettings(temperatures=("served",), top_k=20).known(target)  # not quite as it is served
    assert describe({"sampling": to_record(other)}, 0.6) == "temperature 0.6, top_k 20, repetition_penalty 1.05"
    assert other.unmeasured(target) == "temperature 0.6, repetition_penalty 1.05"


def test_how_drafts_are_drawn():
    settings = EvaluationSettings(temperatures=(0.6,), top_k=20, truncate_drafts=False)
    written = json.loads(json.dumps({"sampling": to_record(settings)}))
    assert sampling_of(written, 0.6) == settings.sampling(0.6) != replace(settings, truncate_drafts=True).sampling(0.6)
    assert describe(written, 0.6) == "temperature 0.6, top_k 20; sampled drafts by the temperature alone"


def test_evaluations_from_before_it_was_written():
    assert sampling_of({"top_k": 5, "top_p": 0.9}, 1.0) == Sampling(1.0, 5, 0.9)
    assert describe({}, 0.7) == "temperature 0.7"
