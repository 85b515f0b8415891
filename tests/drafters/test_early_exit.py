"""Self-speculation: drafts are of the layers that are left, from the target's cache; answers are its own."""

import copy

import pytest
import torch
from transformers import DynamicCache

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.requests import Requests
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.early_exit import EarlyExit
from specdraft.errors import UserError
from specdraft.evaluation.speedup.rank_accuracy import draft_ranks, replayed_acceptance_length
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SETTINGS = [{"num_layers": 3}, {"skip_layers": [1]}, {"skip_layers": [0, 2]}]
KEPT = [[0, 1, 2], [0, 2, 3], [1, 3]]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return Target.from_model(FAMILIES[request.param].build())


@pytest.fixture(scope="module")
def llama():
    return Target.from_model(tiny_llama(num_hidden_layers=4))


def reference(model, kept, text, path):
    """Logits after the text and after every token of the path. Transformers' own cache, filled by the whole model with
    all but the last token of the text; the other layers of a copy hand on what they are given."""
    cache = DynamicCache()
    if len(text) > 1:
        model.get_decoder()(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
    partial = copy.deepcopy(model)
    for number, layer in enumerate(partial.get_decoder().layers):
        if number not in kept:
            layer.forward = lambda hidden_states, *_, **__: hidden_states
    logits = []
    for token in [text[-1], *path]:
        logits.append(partial(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1])
        for number in set(range(4)) - set(kept):  # as long as the others: masks are made for the first layer's length
            layer = cache.layers[number]
            if layer.is_initialized:
                layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
    return torch.stack(logits)


@pytest.mark.parametrize(("options", "kept"), zip(SETTINGS, KEPT, strict=True), ids=str)
@torch.inference_mode()
def test_drafts_are_of_the_layers_that_are_left_and_of_the_targets_keys(target, options, kept):
    decoder = Decoder(target, EarlyExit(**options), 3)
    batch = Requests(decoder, 2, 40)
    prompts, path = random_prompts(2, [9, 5], V), [4, 11]
    for number, prompt in enumerate(prompts):
        batch.begin(number, prompt, 20, number)
    batch.round()  # the second draft overwrites what the first has left
    texts = Texts(batch.lengths, int(batch.lengths.max()))
    found = [batch.drafting.first(texts)]
    for depth, token in enumerate(path, start=1):
        level = Level(torch.full((2, 1), token), torch.zeros((2, 1), dtype=torch.int64), depth, depth - 1, None)
        found.append(batch.drafting.extend(texts, level)[:, 0])
    for row, request in enumerate(batch.under_way):
        expected = reference(target.model, kept, prompts[row] + request.result.tokens, path)
        torch.testing.assert_close(torch.stack(found, dim=1)[row], expected, **CLOSE)


@pytest.mark.parametrize("options", SETTINGS[::2], ids=str)
def test_answers_of_every_architecture_are_its_own(target, options):
    prompts = random_prompts(5, [3, 7, 12], V)
    found = Decoder(target, EarlyExit(**options), 3).generate_batch(prompts, 12, 3)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 12)


@pytest.mark.parametrize("shape", [4, BUSH, DynamicTree(3, 2, 6)], ids=str)
def test_every_shape_beside_others_as_alone(llama, shape):
    prompts = random_prompts(6, [1, 2, 9])
    decoder = Decoder(llama, EarlyExit(skip_layers=[1]), shape)
    together = decoder.generate_batch(prompts, 40, 4)
    assert [each.tokens for each in together] == transformers_greedy(llama.model, prompts, 40)
    alone = [decoder.generate(prompt, 40) for prompt in prompts]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert sum(map(sum, (each.accepted for each in alone))) > 20


def test_the_cost_model_replays_what_decoding_accepts(llama):
    """Replaying, too, the keys of the text are the target's and not those of earlier drafts."""
    prompts, drafter = random_prompts(3, [4, 9]), EarlyExit(skip_layers=[0])
    found = Decoder(llama, drafter, 3).generate_batch(prompts, 32, 2)
    ranks = draft_ranks(drafter, llama, [(p, each.tokens) for p, each in zip(prompts, found, strict=True)], 3, 2)
    replayed = replayed_acceptance_length(ranks, StaticTree.chain(3))
    rounds = [accepted for each in found for accepted in each.accepted[:-1]]  # the last may be cut short
    assert sum(rounds) > 5 and replayed == pytest.approx(1 + sum(rounds) / len(rounds), abs=0.15)


def test_a_third_of_the_layers_unless_told_otherwise(llama):
    for options, kept in (({}, 1), ({"num_layers": 2}, 2), ({"skip_layers": [2, 3]}, 2), ({"skip_layers": [0]}, 4)):
        drafter = EarlyExit(**options)
        drafter.bind(llama)
        assert drafter.model.decoder.layers[kept - 1] is llama.decoder.layers[kept - 1]
        assert len(drafter.model.decoder.layers) == kept and drafter.draws and not list(drafter.parameters())
        assert EarlyExit(**drafter.config()).config() == options | {
            name: None for name in ("num_layers", "skip_layers") if name not in options
        }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": 4}, "num_layers=4: expected 1 to 3 of the target's 4"),
        ({"num_layers": 0}, "num_layers=0: expected 1 to 3"),
        ({"skip_layers": [4]}, r"skip_layers=\[4\]: expected some numbers from 0 to 3"),
        ({"skip_layers": [0, 1, 2, 3]}, "but not all of them"),
        ({"skip_layers": 4}, "skip_layers=4: expected how many, 1 to 3, or their numbers"),
        ({"skip_layers": [1], "num_layers": 1}, "expected one of them, and null for the other"),
    ],
)
def test_bad_layers(llama, options, said):
    with pytest.raises(UserError, match=said):
        Decoder(llama, EarlyExit(**options), 3)
