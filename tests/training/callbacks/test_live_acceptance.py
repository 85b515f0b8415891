import shutil
from functools import partial
from pathlib import Path

import pytest

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import load_drafter, read_config
from specdraft.evaluation.tuning import Answers
from specdraft.targets import Target
from specdraft.training.callbacks.live_acceptance import LiveAcceptance, Measurement, first_sampling
from specdraft.training.fit import copy_best_from_resumed
from tests.drafters.jacobi_forcing.conftest import trained
from tests.fakes import tiny_llama


def resumed(make_run, tmp_path, monkeypatch, found, move=lambda run: run / "checkpoints" / "last.ckpt", **options):
    """The best length and step of a run whose first 8 steps measure 2.5 and 2.0, resumed with ``found`` at step 12."""

    def told(live, trainer, module, drafter):
        length = (2.5, 2.0, found)[trainer.global_step // live.every_n_steps - 1]
        return Measurement(AcceptanceCounts(live.num_draft_tokens, rounds=100, accepted=round(100 * (length - 1))), {})

    monkeypatch.setattr(LiveAcceptance, "_decode", told)
    trainer, module, data, live, _ = make_run(tmp_path / "part", max_steps=8)
    trainer.fit(module, data)
    assert (live.best, live.best_step) == (2.5, 4)
    trainer, module, data, live, _ = make_run(tmp_path / "rest", max_steps=12)
    for name, value in options.items():
        setattr(live, name, value)
    checkpoint = move(tmp_path / "part")
    copy_best_from_resumed(checkpoint.resolve(), tmp_path / "rest")
    trainer.fit(module, data, ckpt_path=checkpoint)
    head = read_config(tmp_path / "rest" / "drafter")["extra"]["training"]
    assert (head["live_acceptance_length"], head["step"]) == (live.best, live.best_step)
    assert (tmp_path / "rest" / "checkpoints" / "best.ckpt").is_file()
    return live.best, live.best_step


def alone(run: Path) -> Path:
    """The checkpoint moved to a folder where someone else's head lies."""
    (run.parent / "else" / "files").mkdir(parents=True)
    shutil.copytree(run / "drafter", run.parent / "else" / "drafter")
    return shutil.copy(run / "checkpoints" / "last.ckpt", run.parent / "else" / "files" / "moved.ckpt")


def without_its_head(run: Path) -> Path:
    shutil.rmtree(run / "drafter")
    return run / "checkpoints" / "last.ckpt"


def test_the_best_head_of_a_resumed_run_stays_until_it_is_beaten(make_run, tmp_path, monkeypatch):
    assert resumed(make_run, tmp_path / "worse", monkeypatch, 2.25) == (2.5, 4)
    assert resumed(make_run, tmp_path / "better", monkeypatch, 2.75) == (2.75, 12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_draft_tokens": 2}, "measured with other prompts or settings"),
        ({"sampling": Sampling(1.0)}, "measured with other prompts or settings"),
        ({"prompts": [[5, 6]]}, "measured with other prompts or settings"),
        ({"move": alone}, "is not beside the checkpoint"),
        ({"move": without_its_head}, "is not beside the checkpoint"),
    ],
)
def test_a_best_that_cannot_be_compared_or_is_not_there_is_no_rival(make_run, tmp_path, monkeypatch, options, reason):
    with pytest.warns(UserWarning, match=reason):
        assert resumed(make_run, tmp_path, monkeypatch, 2.25, **options) == (2.25, 12)


@pytest.mark.parametrize("temperature", [0.5, [0.5, 1.0]])
def test_the_first_temperature_is_decoded_at(temperature):
    target = Target.from_model(tiny_llama())
    assert first_sampling(target, temperature, top_k=3, top_p=0.9) == Sampling(0.5, 3, 0.9)


def test_it_decodes_as_the_target_is_served(make_run, tmp_path, target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "temperature", 0.6)
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 1.05)
    sampling = partial(first_sampling, temperature=["served", 0.0], top_k=None, top_p=0.9)
    live = LiveAcceptance([[5, 6, 7]], tmp_path / "drafter", sampling=sampling)
    trainer, module, _, _, _ = make_run()
    live.setup(trainer, module, "fit")
    assert live.sampling == Sampling(0.6, top_p=0.9, repetition_penalty=1.05)
    measured = live.state_dict()["measures"]
    assert measured["repetition_penalty"] == 1.05 and "presence_penalty" not in measured


@pytest.mark.parametrize(
    ("said", "engine", "truncates"),
    [(True, True, True), (True, False, False), (True, None, True), (False, None, False)],
)
def test_sampled_drafts_are_drawn_as_the_engine_draws_them(make_run, tmp_path, said, engine, truncates):
    sampling = Sampling(1.0, top_k=4, truncates_drafts=said)
    live = LiveAcceptance([[5, 6, 7]], tmp_path / "drafter", sampling=sampling)
    live.truncates_drafts = engine
    trainer, module, _, _, _ = make_run()
    live.setup(trainer, module, "fit")
    assert live.sampling == Sampling(1.0, top_k=4, truncates_drafts=truncates)
    assert live.state_dict()["measures"].get("truncates_drafts", True) is truncates


def test_a_tuned_target_decodes_and_its_distance_is_logged(make_run, target):
    trainer, module, data, live, _ = make_run(max_steps=4)
    module.drafter = trained(target)
    trainer.fit(module, data)
    drafter, _ = load_drafter(live.directory)
    tuned = drafter.tuned(target)
    found = Answers(target, live.prompts, live.max_new_tokens).distance(tuned)
    values = module.last_values
    assert values["target_greedy_agreement"] == pytest.approx(found.greedy_agreement) and found.divergence > 0.01
    assert values["target_divergence"] == pytest.approx(found.divergence, rel=1e-4)
    rounds, said = 0, []
    for number, prompt in enumerate(live.prompts):
        generation = Decoder(tuned, drafter, 3).generate(prompt, 8, number)
        rounds, said = rounds + len(generation.accepted), [*said, generation.tokens]
    assert live.counts.rounds == rounds
    assert said == [Decoder(tuned).generate(prompt, 8).tokens for prompt in live.prompts]
