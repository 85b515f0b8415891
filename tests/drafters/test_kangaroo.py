"""Kangaroo: drafts are of the first layers and the adapter, as in training; answers are the target's own."""

import pytest
import torch
from torch.nn.functional import kl_div, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import rotate_half

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.requests import Requests
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.kangaroo import Kangaroo
from specdraft.errors import UserError
from specdraft.evaluation.speedup.rank_accuracy import draft_ranks, replayed_acceptance_length
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return Target.from_model(FAMILIES[request.param].build())


@pytest.fixture(scope="module")
def llama():
    return Target.from_model(tiny_llama(num_hidden_layers=4))


def drafter_for(target: Target, **options) -> Kangaroo:
    torch.manual_seed(0)
    drafter = Kangaroo.for_target(target, **options).to(target.dtype)
    with torch.no_grad():  # large random weights: every part must matter
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter.eval()


def reference(drafter: Kangaroo, target: Target, text: list[int]) -> torch.Tensor:
    """Logits ``[T, V]`` after every token of a text, by plain formulas, from transformers' own hidden states."""
    hidden = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states[drafter.exit_layer][0]
    adapter, attention, config = drafter.adapter, drafter.adapter.self_attn, drafter.layer_config
    cos, sin = (table[: len(text)] for table in drafter.rotary(len(text), hidden))
    normed = adapter.input_layernorm(hidden)

    def heads(projection: torch.nn.Linear) -> torch.Tensor:
        return projection(normed).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)  # [heads, T, d]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + rotate_half(x) * sin

    query, key, value = turned(heads(attention.q_proj)), turned(heads(attention.k_proj)), heads(attention.v_proj)
    groups = config.num_attention_heads // config.num_key_value_heads
    key, value = (part.repeat_interleave(groups, dim=0) for part in (key, value))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
    return target.logits(adapter.norm(hidden + attention.o_proj(attended)))


@torch.inference_mode()
def test_drafts_are_of_the_first_layers_and_the_adapter(target):
    """Of every architecture; beside another request, and after a draft that was rejected."""
    drafter = drafter_for(target)
    batch = Requests(Decoder(target, drafter, 3), 2, 40)
    prompts, path = random_prompts(2, [9, 1], V), [4, 11]
    for number, prompt in enumerate(prompts):
        batch.begin(number, prompt, 20, number)
    batch.round()  # the second draft overwrites what the first has left
    texts = Texts(batch.lengths, int(batch.lengths.max()))
    found = [batch.drafting.first(texts)]
    for depth, token in enumerate(path, start=1):
        level = Level(torch.full((2, 1), token), torch.zeros((2, 1), dtype=torch.int64), depth, depth - 1, None)
        found.append(batch.drafting.extend(texts, level)[:, 0])
    for row, request in enumerate(batch.under_way):
        text = prompts[row] + request.result.tokens + path
        expected = reference(drafter, target, text)[-1 - len(path) :]
        torch.testing.assert_close(torch.stack(found, dim=1)[row], expected, **CLOSE)


def test_what_it_learns_is_what_it_drafts(target):
    """The loss is the divergence from the target of those very distributions, at every token that may be drafted first,
    and its gradients are those of plain formulas."""
    drafter = drafter_for(target).train()
    ids = torch.randint(0, V, (2, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 12, [1] * 5 + [2] * 7])
    positions = torch.tensor([[*range(12)], [*range(5), *range(7)]])
    batch = Batch(ids, positions, documents, positions >= 2)
    result = drafter.training_loss(batch, target.features(ids, positions, drafter.layers), target)
    result.loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()

    divergences = []
    for row, first, end in ((0, 0, 12), (1, 0, 5), (1, 5, 12)):
        text = ids[row, first:end].tolist()
        with torch.no_grad():
            p = target.model(torch.tensor([text])).logits[0].log_softmax(-1)
        q = reference(drafter, target, text).log_softmax(-1)
        # Drafting begins at a token that was emitted, to be learned itself, and what follows is to be learned too.
        divergences += [kl_div(q[at], p[at], log_target=True, reduction="sum") for at in range(2, len(text) - 1)]
    expected = torch.stack(divergences).mean()
    torch.testing.assert_close(result.loss, expected, **CLOSE)
    assert int(result.metrics["step_0/total"]) == len(divergences) == int(drafter.count_supervised(batch)[0])
    expected.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **CLOSE)


def test_a_batch_with_nothing_to_learn(llama):
    drafter = drafter_for(llama).train()
    ids = torch.ones((1, 6), dtype=torch.int64)
    positions = torch.arange(6)[None]
    batch = Batch(ids, positions, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
    result = drafter.training_loss(batch, llama.features(ids, positions, drafter.layers), llama)
    result.loss.backward()
    assert result.loss == 0 and align(batch, 1).counts == [0]
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_answers_of_every_architecture_are_its_own(target):
    prompts = random_prompts(5, [3, 7, 12], V)
    found = Decoder(target, drafter_for(target), 3).generate_batch(prompts, 12, 3)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 12)


@pytest.mark.parametrize("shape", [4, BUSH, DynamicTree(3, 2, 6)], ids=str)
def test_every_shape_beside_others_as_alone(llama, shape):
    prompts = random_prompts(6, [1, 2, 9])
    decoder = Decoder(llama, Kangaroo.for_target(llama, exit_layer=3).double(), shape)
    together = decoder.generate_batch(prompts, 40, 4)
    assert [each.tokens for each in together] == transformers_greedy(llama.model, prompts, 40)
    alone = [decoder.generate(prompt, 40) for prompt in prompts]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert sum(map(sum, (each.accepted for each in alone))) > 10


@torch.inference_mode()
def test_untrained_it_is_the_early_exit(llama):
    """Where the target's final norm is one of ones, as the adapter's."""
    prompt = random_prompts(3, [9])[0]
    found = []
    for drafter in (EarlyExit(num_layers=2), Kangaroo.for_target(llama, exit_layer=2).double()):
        batch = Requests(Decoder(llama, drafter, 3), 1, 40)
        batch.begin(0, prompt, 20, 0)
        found.append(batch.drafting.first(Texts(batch.lengths, int(batch.lengths.max()))))
    assert torch.equal(llama.norm.weight, torch.ones_like(llama.norm.weight))
    torch.testing.assert_close(*found, **CLOSE)


def test_the_cost_model_replays_what_decoding_accepts(llama):
    prompts, drafter = random_prompts(3, [4, 9]), Kangaroo.for_target(llama, exit_layer=3).double()
    found = Decoder(llama, drafter, 3).generate_batch(prompts, 32, 2)
    ranks = draft_ranks(drafter, llama, [(p, each.tokens) for p, each in zip(prompts, found, strict=True)], 3, 2)
    replayed = replayed_acceptance_length(ranks, StaticTree.chain(3))
    rounds = [accepted for each in found for accepted in each.accepted[:-1]]  # the last may be cut short
    assert sum(rounds) > 5 and replayed == pytest.approx(1 + sum(rounds) / len(rounds), abs=0.15)


def test_saved_and_loaded(llama, tmp_path):
    drafter = drafter_for(llama, exit_layer=1)
    save_drafter(drafter, tmp_path / "drafter", llama.identity)
    loaded, _ = load_drafter(tmp_path / "drafter")
    assert type(loaded) is Kangaroo and loaded.layers == (1,) and loaded.config() == drafter.config()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_the_layer_where_it_leaves(llama):
    assert Kangaroo.for_target(llama).exit_layer == 2
    assert Kangaroo.for_target(Target.from_model(tiny_llama(num_hidden_layers=2))).exit_layer == 1
    assert Kangaroo.for_target(Target.from_model(tiny_llama(num_hidden_layers=30))).exit_layer == 3
    for layer in (0, 4):
        with pytest.raises(UserError, match=f"exit_layer={layer}: expected 1 to 3 of the target's 4"):
            Kangaroo.for_target(llama, exit_layer=layer)
    with pytest.raises(UserError, match="draft_vocab_size=null"):
        Kangaroo.for_target(llama, torch.arange(5))


@pytest.mark.parametrize("wide", [{"hidden_size": 512}, {"intermediate_size": 1024}, {"head_dim": 128}], ids=str)
def test_activation_bytes_are_what_backward_keeps(wide):
    """In bf16, as large targets are trained for; the target's MLP is none of it."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 8} | wide
    target = Target.from_model(tiny_llama(vocab_size=256, context=256, num_hidden_layers=6, **sizes).bfloat16())
    ids = torch.arange(200)[None]
    batch = Batch(ids, ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    drafter = Kangaroo.for_target(target).bfloat16()
    feature = drafter.feature(target.features(ids, ids, drafter.layers))
    weights, kept = {each.untyped_storage().data_ptr() for each in drafter.parameters()}, {}

    def keep(tensor):
        if tensor.numel() > 1000 and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        drafter._unroll(align(batch, 1), feature, drafter.decay)
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert drafter.activation_bytes(200, 2) == pytest.approx(held, rel=0.11)
