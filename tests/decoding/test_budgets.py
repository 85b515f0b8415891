"""What a pass and a round may cost to launch, whatever the batch: budgets that need no GPU to be held."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Pass
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.ensemble import Ensemble
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.drafters.kangaroo import Kangaroo
from specdraft.drafters.lookahead import Lookahead
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.targets import Target
from tests.decoding.counting import CountedDispatches, CountedSyncs
from tests.drafters.tli.drafts import translating
from tests.fakes import random_prompts, tiny_llama

PENALIZED = Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
PER_LAYER = 60
SHAPES = {
    "chain": StaticTree.chain(5),
    "static tree": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic tree": DynamicTree(4, 3, 8),
}
DRAFTERS = {
    "plain": lambda target: None,
    "eagle3": lambda target: Eagle3.for_target(target, torch.arange(0, 64, 2), layers=(1,)),
    "eagle3, two layers": lambda target: Eagle3.for_target(
        target, None, layers=(1,), num_layers=2, qk_norm=True, norm_before_fc=True, sliding_window=9
    ),
    "eagle": lambda target: Eagle.for_target(target),
    "medusa": lambda target: Medusa.for_target(target),
    "hydra": lambda target: Hydra.for_target(target),
    "redrafter": lambda target: ReDrafter.for_target(target),
    "mtp": lambda target: MTP.for_target(target),
    "p_eagle": lambda target: PEagle.for_target(target, None, layers=(1,), num_layers=2),
    "dflash": lambda target: DFlash.for_target(target, torch.arange(0, 64, 2), layers=(1,), num_layers=2),
    "dspark": lambda target: DSpark.for_target(target, torch.arange(0, 64, 2), layers=(1,), num_layers=1),
    "domino": lambda target: Domino.for_target(target, torch.arange(0, 64, 2), layers=(1,), num_layers=1),
    "kangaroo": lambda target: Kangaroo.for_target(target, exit_layer=1),
    "draft": lambda target: DraftModel.for_target(target, copy_layers=1),
    "pard": lambda target: Pard.for_target(target, copy_layers=1),
    "tli_draft": translating,
    "early_exit": lambda target: EarlyExit(),
    "ensemble": lambda target: Ensemble([Medusa.for_target(target), TokenRecycling(), EarlyExit()]),
    "jacobi": lambda target: Jacobi(),
    "jacobi_forcing": lambda target: JacobiForcing.for_target(target),
    "token_recycling": lambda target: TokenRecycling(),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request):
    target = Target.from_model(tiny_llama())
    return target, DRAFTERS[request.param](target)


def begun(decoder: Decoder, requests: int) -> Requests:
    """Requests of unequal lengths, after their first round, in which constants are made."""
    batch = Requests(decoder, requests, 90)
    for number, prompt in enumerate(random_prompts(requests, [3, 9, 5, 14])):
        batch.begin(number, prompt, 64, number)
    batch.round()
    return batch


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_pass_dispatches_so_much_per_layer_whatever_the_batch(tokens):
    counts = {}
    for layers in (2, 6):
        target = Target.from_model(tiny_llama(num_hidden_layers=layers))
        for requests in (1, 3, 32):
            cache, lengths = target.new_cache(requests, 64), torch.arange(requests) + 7
            reading = Pass.text(torch.ones((requests, tokens), dtype=torch.int64), lengths, 7 + requests - 1)
            target.step(reading, cache)
            with CountedDispatches() as counted:
                target.step(reading, cache)
            counts[layers, requests] = counted.count
    per_layer = {requests: (counts[6, requests] - counts[2, requests]) / 4 for requests in (1, 3, 32)}
    assert max(per_layer.values()) <= PER_LAYER
    assert per_layer[3] == per_layer[32]
    assert counts[2, 3] == counts[2, 32]
    assert counts[2, 32] - 2 * per_layer[32] < 40  # beside the layers


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=20), PENALIZED], ids=["0", "1", "penalized"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_waits_once_and_dispatches_as_much_for_more_requests(pair, shape, sampling):
    target, drafter = pair
    if drafter is not None:
        drafter.bind(target)
    decoder = Decoder(target, drafter, SHAPES[shape], sampling)
    dispatches = {}
    for requests in (2, 24):
        batch = begun(decoder, requests)
        with CountedSyncs() as syncs:
            batch.round()
        assert sum(syncs.count.values()) == 1, syncs.count
        with CountedDispatches() as counted:
            batch.round()
        dispatches[requests] = counted.count
    assert dispatches[2] == dispatches[24]


@torch.inference_mode()
def test_tokens_that_ride_along_cost_as_many_dispatches_for_more_requests():
    """And three waits more: to read what was said, to write the drafts, and to write the riders."""
    dispatches = {}
    for requests in (2, 24):
        batch = begun(Decoder(Target.from_model(tiny_llama()), Lookahead(), 5), requests)
        with CountedSyncs() as syncs:
            batch.round()
        assert syncs.count == {"tolist": 2, "tensor": 2}
        with CountedDispatches() as counted:
            batch.round()
        dispatches[requests] = counted.count
    assert dispatches[2] == dispatches[24]


@torch.inference_mode()
def test_requests_that_come_and_go_copy_one_other_at_most():
    target = Target.from_model(tiny_llama())
    decoder = Decoder(target, Eagle3.for_target(target, None, layers=(1,)), 5)
    counts = {}
    for requests in (3, 24):
        batch = begun(decoder, requests)
        with CountedDispatches() as counted:
            batch.drop(0)
            batch.begin(requests, [1, 2, 3, 4], 64, 0)
        counts[requests] = counted.count
    assert counts[3] == counts[24]
