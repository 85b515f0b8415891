import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdraft.data import regenerate as module
from specdraft.data.regenerate import RegenerationSettings, generate_batch, plan_batches, regenerate
from specdraft.errors import UserError
from specdraft.targets import Target

SETTINGS = RegenerationSettings(temperatures=(0.0, 1.0), max_new_tokens=6, batch_size=3, seed=5)


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 9, 4, 12, 1, 7, 5, 5, 8, 2]
    return [torch.randint(6, 300, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that were really generated."""
    made: list[int] = []
    real = generate_batch

    def counted(target: Target, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(len(prompts))
        return real(target, prompts, *args, **kwargs)

    monkeypatch.setattr(module, "generate_batch", counted)
    return made


def alone(target: Target, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding by argmax of the full forward, one prompt at a time, without cache or padding."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


def with_end(target: Target, token: int) -> Target:
    target.model.generation_config.eos_token_id = [token, target.tokenizer.eos_token_id]
    return target


def test_padding_changes_no_greedy_token(target: Target, prompts: list[list[int]]) -> None:
    expected = [alone(target, prompt, 6) for prompt in prompts]
    assert generate_batch(target, prompts, 0.0, 6, seed=0) == expected
    assert len({tuple(response) for response in expected}) > 5


def test_responses_stop_at_the_end_mark_and_keep_it(target: Target, prompts: list[list[int]]) -> None:
    end = alone(target, prompts[0], 6)[2]
    with_end(target, end)
    responses = generate_batch(target, prompts, 0.0, 6, seed=0)
    assert responses == [alone(target, prompt, 6) for prompt in prompts]
    assert responses[0][-1] == end
    assert len(responses[0]) <= 3
    assert max(map(len, responses)) == 6


def test_sampling_follows_the_targets_distribution(target: Target, prompts: list[list[int]]) -> None:
    # A generation config in the target's directory must not bend the distribution.
    target.model.generation_config.update(top_k=2, repetition_penalty=3.0, do_sample=True)
    draws, temperature = 4000, 0.7
    responses = generate_batch(target, [prompts[0]] * draws, temperature, 1, seed=0)
    assert target.model.generation_config.top_k == 2
    p = (target.model(torch.tensor([prompts[0]])).logits[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(responses)[:, 0], minlength=target.vocab_size).double()
    expected = p * draws
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    degrees = int(common.sum())
    assert degrees >= 10
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # mean + 4 standard deviations


def test_temperatures_take_turns_and_lengths_are_grouped(prompts: list[list[int]]) -> None:
    batches = plan_batches(prompts, SETTINGS)
    assert sorted(i for _, members in batches for i in members) == list(range(10))
    assert all(SETTINGS.temperatures[i % 2] == temperature for temperature, members in batches for i in members)
    assert all(len(members) <= 3 for _, members in batches)
    assert max(map(len, prompts)) == len(prompts[batches[0][1][0]])


def test_greedy_and_sampled_responses_come_back_in_order(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    responses = regenerate(target, prompts, SETTINGS, tmp_path)
    greedy = [alone(target, prompt, 6) for prompt in prompts]
    assert responses[::2] == greedy[::2]
    assert responses[1::2] != greedy[1::2]
    other_seed = regenerate(target, prompts, replace(SETTINGS, seed=6), tmp_path)
    assert other_seed[::2] == responses[::2]
    assert other_seed[1::2] != responses[1::2]


def test_the_global_random_state_plays_no_part_and_is_kept(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    first = regenerate(target, prompts, SETTINGS, tmp_path / "a")
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert regenerate(target, prompts, SETTINGS, tmp_path / "b") == first
    assert torch.equal(torch.get_rng_state(), state)


def test_the_cache_answers_the_second_time(
    target: Target, prompts: list[list[int]], tmp_path: Path, calls: list[int]
) -> None:
    first = regenerate(target, prompts, SETTINGS, tmp_path)
    assert sum(calls) == len(prompts)
    calls.clear()
    assert regenerate(target, prompts, SETTINGS, tmp_path) == first
    assert calls == []
    assert not list(tmp_path.rglob("*.partial.jsonl"))


def test_other_settings_prompts_or_targets_are_other_entries(
    target: Target, prompts: list[list[int]], tmp_path: Path, calls: list[int]
) -> None:
    regenerate(target, prompts, SETTINGS, tmp_path)
    torch.manual_seed(9)
    other = Target.from_model(LlamaForCausalLM(target.model.config).double(), target.tokenizer)
    for arguments in (
        (target, prompts[:-1], SETTINGS),
        (target, prompts, replace(SETTINGS, max_new_tokens=5)),
        (other, prompts, SETTINGS),
        (with_end(target, 77), prompts, SETTINGS),
    ):
        calls.clear()
        regenerate(*arguments, tmp_path)
        assert calls


@pytest.mark.parametrize("torn", [b"", b'{"batch": 2, "respon', b'{"batch": 2, "responses": [[1], [2], [3]]}'])
def test_an_interrupted_run_continues_with_the_same_result(
    target: Target, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    expected = regenerate(target, prompts, SETTINGS, tmp_path / "whole")
    real, made = generate_batch, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "generate_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, prompts, SETTINGS, tmp_path / "cut")
    (partial,) = tmp_path.joinpath("cut").rglob("*.partial.jsonl")
    assert [json.loads(line)["batch"] for line in partial.read_text().splitlines()] == [0, 1]
    with partial.open("ab") as file:
        file.write(torn)
    assert regenerate(target, prompts, SETTINGS, tmp_path / "cut") == expected
    assert made == 3 + len(plan_batches(prompts, SETTINGS)) - 2


def test_a_damaged_cache_is_named(target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    regenerate(target, prompts, SETTINGS, tmp_path)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=f"{path.name} are damaged.*delete that file"):
        regenerate(target, prompts, SETTINGS, tmp_path)


def test_what_cannot_be_generated_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="251 tokens and 6 new tokens do not fit the target's context of 256"):
        regenerate(target, [[7] * 251], SETTINGS, tmp_path)
    with pytest.raises(UserError, match=r"data\.temperatures is \[-1\.0\]"):
        RegenerationSettings(temperatures=(-1.0,))
    with pytest.raises(UserError, match="max_new_tokens of regeneration is 0"):
        RegenerationSettings(max_new_tokens=0)
