"""What a round of the decode loop costs the host, and what requests that are decoded side by side have of their own."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

from specdraft.decoding import decoder as loop
from specdraft.decoding import rules
from specdraft.decoding.cache import StaticCache
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.targets import Target
from tests.fakes import TargetAsDraft, random_prompts, tiny_llama

CHAIN, DYNAMIC = StaticTree.chain(3), DynamicTree(3, 3, 8)
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SHAPES = [CHAIN, STATIC, DYNAMIC]

aten = torch.ops.aten
_WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten.unique_dim}


class Waits(TorchDispatchMode):
    """Names of the operations that would wait for a device, or copy from the host to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        copied = func.overloadpacket is aten.lift_fresh and args[0].ndim  # numbers are written by the device itself
        if func.overloadpacket in _WAITING or copied or masks:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch) -> list[list[str]]:
    """Of every round, what waited for the device."""
    rounds: list[list[str]] = []
    tolist, whole = Tensor.tolist, loop.Requests.round

    def watched(batch: Any) -> None:
        with Waits() as mode, monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", lambda tensor: mode.seen.append("tolist") or tolist(tensor))
            whole(batch)
        rounds.append(mode.seen)

    monkeypatch.setattr(loop.Requests, "round", watched)
    return rounds


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=4, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_round_waits_for_the_device_once(target, answers, untrained, waits, shape, sampling, batch_size):
    Decoder(target, untrained(target), shape, sampling).generate_batch(answers.prompts[:4], 8, batch_size)
    assert len(waits) > 5
    assert waits[1:] == [["tolist"]] * (len(waits) - 1)
    assert {name for name in waits[0] if "lift_fresh" not in name} == {"tolist"}  # constants are copied once


@pytest.mark.parametrize("rule", [rules.Ears(), rules.Typical()], ids=str)
def test_the_divergence_of_a_lossy_rule_is_read_when_a_request_ends(target, answers, untrained, waits, rule):
    decoder = Decoder(target, untrained(target), CHAIN, Sampling(1.0), rule)
    (result,) = decoder.generate_batch(answers.prompts[:1], 12, 1)
    assert waits[1:] == [["tolist"]] * (len(waits) - 1)
    assert len(result.divergence) == len(result.accepted) == len(waits)
    assert all(0 <= divergence < 1 for divergence in result.divergence)


def test_plain_decoding_waits_once_too(target, answers, waits):
    Decoder(target).generate_batch(answers.prompts[:2], 12, 2)
    assert waits == [["tolist"]] * 11


def both_ways(decoder: Decoder, prompts: list[list[int]], count: int, batch_size: int) -> None:
    """What is decoded is the same alone and side by side."""
    together = decoder.generate_batch(prompts, count, batch_size)
    for number, (prompt, one) in enumerate(zip(prompts, together, strict=True)):
        alone = decoder.generate(prompt, count, number)
        names = ("tokens", "drafted", "accepted", "nodes", "divergence")
        for name in names[:-1]:
            assert getattr(one, name) == getattr(alone, name)
        assert one.divergence == pytest.approx(alone.divergence, abs=1e-5)


@pytest.mark.parametrize("drafter", [PromptLookup(), TargetAsDraft()], ids=lambda drafter: type(drafter).__name__)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=3)], ids=["greedy", "sampled"])
def test_drafters_of_one_request_are_joined(target, drafter, sampling):
    prompts = [[5, 6, 7, 5, 6], [9, 9, 9], [1], [3, 4, 3, 4, 3], [8, 2]]
    both_ways(Decoder(target, drafter, 4, sampling), prompts, 24, 3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_question_that_is_answered_several_times_is_read_once(
    target, answers, untrained, monkeypatch, sampling, drafts
):
    one, other = answers.prompts[:2]
    asked, read = [one, one, other, one, one, one, one], []
    step = type(target).step

    def counted(target, reading, *args):
        read.append(reading.ids.shape == (1, len(one)) and reading.ids[0].tolist() == one)
        return step(target, reading, *args)

    monkeypatch.setattr(type(target), "step", counted)
    decoder = Decoder(target, untrained(target) if drafts else None, CHAIN, sampling)
    decoder.generate_batch(asked, 8, 6)
    assert read[:3] == [True, False, True]  # another question lies between
    assert sum(read) == 3  # and rounds before the last one
    monkeypatch.undo()
    both_ways(decoder, asked, 16, 6)


@pytest.mark.parametrize("rule", [rules.Ears(0.3), rules.Typical()], ids=str)
@pytest.mark.parametrize("shape", [CHAIN, STATIC], ids=str)
def test_lossy_rules_do_the_same_alone_and_side_by_side(target, answers, untrained, rule, shape):
    both_ways(Decoder(target, untrained(target), shape, Sampling(1.0), rule), answers.prompts[:5], 20, 3)


@pytest.fixture(scope="module")
def short() -> Target:
    return Target.from_model(tiny_llama(context=32))


NEAR_THE_END = random_prompts(12, [20, 29, 24, 30, 27, 28], seed=5)


@pytest.mark.parametrize("shape", [CHAIN, STATIC], ids=str)
def test_seeds_decide_to_the_end_of_the_context(short, untrained, shape):
    both_ways(Decoder(short, untrained(short), shape, Sampling(1.0)), NEAR_THE_END, 12, 4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_seeds_decide_as_long_as_the_context_has_room_for_a_draft(short, untrained, shape):
    decoder = Decoder(short, untrained(short), shape, Sampling(1.0))
    together = decoder.generate_batch(NEAR_THE_END, 12, 4)
    assert {len(result.tokens) for result in together} == {12, 8, 5, 4, 3, 2}
    for number, (prompt, one) in enumerate(zip(NEAR_THE_END, together, strict=True)):
        alone = decoder.generate(prompt, 12, number)
        room = max(1, short.max_length - len(prompt) - shape.depth)
        assert one.tokens[:room] == alone.tokens[:room]


def test_a_request_copies_no_other_when_it_comes_or_goes(target, answers, untrained, monkeypatch):
    drops: list[tuple[int, int, int]] = []
    copy = StaticCache.copy
    monkeypatch.setattr(StaticCache, "copy", lambda cache, *rows: drops.append(rows) or copy(cache, *rows))
    prompts = answers.prompts[:8]
    Decoder(target, untrained(target), CHAIN).generate_batch(prompts, 16, 4)
    assert drops and all(row < last and length <= 16 + max(map(len, prompts)) + 4 for last, row, length in drops)
    assert len(drops) <= 2 * len(prompts)  # of the target's cache, and of the head's


@pytest.mark.parametrize("drafts", [False, True])
def test_nothing_of_a_batch_outlives_it(drafts: bool) -> None:
    target = Target.from_model(tiny_llama())
    drafter = Eagle3.for_target(target, torch.arange(0, 64, 2), layers=[1, 2]).eval() if drafts else None
    decoder = Decoder(target, drafter, 3)
    gc.collect()
    gc.disable()  # it counts objects, and a cache of gigabytes is a few
    try:
        decoder.generate_batch(random_prompts(3, (3, 9)), 8, 3)
        left = [each for each in gc.get_objects() if isinstance(each, StaticCache | DynamicLayer)]
    finally:
        gc.enable()
    assert not left
