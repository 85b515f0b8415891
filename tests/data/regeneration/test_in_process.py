"""The engine in this process, on a random target in fp64 against decoding by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.data.regeneration.in_process import InProcess, plan_batches
from specdraft.data.regeneration.request import RegenerationSettings, Request
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle.eagle3 import Eagle3
from specdraft.errors import UserError
from specdraft.targets import Target

SETTINGS = RegenerationSettings(max_new_tokens=6, batch_size=3)


Ids = list[int]


@pytest.fixture
def prompts() -> list[Ids]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 9, 4, 12, 1, 7, 5, 5, 8, 2]
    return [torch.randint(6, 300, (length,), generator=generator).tolist() for length in lengths]


def asked(prompts: list[Ids], *temperatures: float) -> list[Request]:
    return [Request(p, (), (), Sampling(temperatures[i % len(temperatures)]), 7 + i, 6) for i, p in enumerate(prompts)]


def answered(engine: InProcess, target: Target, requests: list[Request], settings: Any = SETTINGS) -> list[Ids]:
    found = list(engine.answers(target, requests, settings))
    assert sorted(number for number, _ in found) == list(range(len(requests)))
    return [ids for _, ids in sorted(found)]


def alone(target: Target, prompt: Ids, max_new_tokens: int) -> Ids:
    """Greedy decoding by argmax of the full forward, one prompt at a time, without cache or padding."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


def test_greedy_answers_are_those_of_decoding_alone(target: Target, prompts: list[Ids]) -> None:
    target.model.generation_config.eos_token_id = [alone(target, prompts[0], 6)[2], target.tokenizer.eos_token_id]
    expected = [alone(target, prompt, 6) for prompt in prompts]
    assert answered(InProcess(), target, asked(prompts, 0.0)) == expected
    assert expected[0][-1] in target.eos_token_ids and len(expected[0]) <= 3 and max(map(len, expected)) == 6


def test_nothing_that_is_measured_decides_the_answers(
    target: Target, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "decoding_threads", property(lambda self: pytest.fail("measured")))
    assert answered(InProcess(), target, asked(prompts, 0.0)) == [alone(target, prompt, 6) for prompt in prompts]


def test_draws_depend_on_the_seed_alone(target: Target, prompts: list[Ids]) -> None:
    requests = asked(prompts, 0.0, 1.0)
    torch.manual_seed(1)
    first = answered(InProcess(), target, requests)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    others = RegenerationSettings(max_new_tokens=6, batch_size=4)
    assert answered(InProcess(), target, requests[::-1], others) == first[::-1]
    assert torch.equal(torch.get_rng_state(), state)
    reseeded = answered(InProcess(), target, [request._replace(seed=request.seed + 99) for request in requests])
    assert reseeded[::2] == first[::2] and reseeded[1::2] != first[1::2]


def test_sampling_follows_the_targets_distribution(target: Target, prompts: list[Ids]) -> None:
    # A generation config in the target's directory must not bend the distribution.
    target.model.generation_config.update(top_k=2, repetition_penalty=3.0, do_sample=True)
    draws, temperature = 1500, 0.7
    requests = [Request(prompts[0], (), (), Sampling(temperature), seed, 1) for seed in range(draws)]
    settings = RegenerationSettings(max_new_tokens=1, batch_size=500)
    tokens = torch.tensor(answered(InProcess(), target, requests, settings))[:, 0]
    expected = (target.model(torch.tensor([prompts[0]])).logits[0, -1] / temperature).softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=target.vocab_size).double()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    degrees = int(common.sum())
    assert degrees >= 10
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # mean + 4 standard deviations


def test_answers_are_sampled_as_the_target_is_served(target: Target, prompts: list[Ids]) -> None:
    """With penalties, and beside answers that are sampled otherwise."""
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.5)
    requests = [request._replace(sampling=sampling) for request in asked(prompts, 0.0)]
    alone_ = [Decoder(target, sampling=sampling).generate(prompt, 6).tokens for prompt in prompts]
    assert alone_ != [alone(target, prompt, 6) for prompt in prompts]
    both = answered(InProcess(), target, [*requests, *asked(prompts, 0.0)])
    assert both == [*alone_, *(alone(target, prompt, 6) for prompt in prompts)]


def test_a_drafter_changes_no_greedy_answer(target: Target, prompts: list[Ids], tmp_path: Path) -> None:
    vocabulary = torch.arange(0, target.vocab_size, 2)
    checkpoint = save_drafter(Eagle3.for_target(target, vocabulary), tmp_path / "head", target.identity)
    engine = InProcess(str(checkpoint), num_draft_tokens=3)
    requests = asked(prompts, 0.0)
    assert answered(engine, target, requests) == answered(InProcess(), target, requests)
    assert engine._drafter is not None
    engine.close()
    assert engine._drafter is None


def test_a_missing_drafter_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no drafter checkpoint at"):
        InProcess(str(tmp_path))


def test_batches_have_one_temperature_and_similar_lengths(prompts: list[Ids]) -> None:
    requests = asked(prompts, 0.0, 1.0)
    batches = plan_batches(requests, 3)
    assert sorted(number for batch in batches for number in batch) == list(range(10))
    assert all(len({requests[number].sampling.temperature for number in batch}) == 1 for batch in batches)
    assert max(map(len, batches)) == 3
    lengths = [len(prompts[batch[0]]) for batch in batches]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == max(map(len, prompts))


def test_a_batch_known_in_part_is_decoded_as_a_whole(target: Target, prompts: list[Ids]) -> None:
    requests = asked(prompts, 0.0)
    batches = plan_batches(requests, 3)
    known = {*batches[0], batches[1][0]}
    found = [number for number, _ in InProcess().answers(target, requests, SETTINGS, known)]
    assert sorted(found) == sorted(number for batch in batches[1:] for number in batch)
