"""ReDrafter: the cell and the exit are the paper's, the search is beam search, and what it drafts may be long."""

import pytest
import torch

from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.drafters.test_last_state import STEPS, VOCABULARY, drafter_for, features_of, state_after
from tests.fakes import tiny_llama


def published_logits(drafter, last, tokens):
    """The plain formula after each of ``tokens [t]``, of ``last [H]``: ``[t, Vd]``."""
    weights, state, logits = dict(drafter.named_parameters()), torch.zeros_like(last), []
    silu = torch.nn.functional.silu
    for token in tokens:
        read = drafter.embedding_scale * drafter.target.embedding_weight[token]
        state = silu(weights["rnn_w.weight"] @ read + weights["rnn_u.weight"] @ state + weights["rnn_u.bias"])
        x = torch.cat([last, state])
        if "input_proj.weight" in weights:
            x = weights["input_proj.weight"] @ x + weights["input_proj.bias"]
        for layer in range(len(drafter.block.layers)):
            x = x + silu(weights[f"block.layers.{layer}.weight"] @ x + weights[f"block.layers.{layer}.bias"])
        logits.append(weights["lm_head.weight"] @ x)
    return torch.stack(logits)


@pytest.mark.parametrize("exit_size", [None, 40, 24])
def test_logits_are_the_plain_formula(exit_size, target, packed):
    drafter = drafter_for(ReDrafter, target, exit_size=exit_size, num_layers=2)
    state, path = state_after(drafter, packed), [7, 90, 3]
    tokens = [int(state.drafting.token[0]), *path]
    expected = published_logits(drafter, state.drafting.last[0], tokens)
    torch.testing.assert_close(state.along(path), expected, rtol=1e-10, atol=1e-10)
    assert expected.shape == (4, len(VOCABULARY))


@pytest.mark.parametrize("exit_size", [None, 40])
def test_an_untrained_drafter_says_what_the_target_says(exit_size, target, packed):
    drafter = ReDrafter.for_target(target, VOCABULARY, exit_size=exit_size).double()
    state = state_after(drafter, packed)
    own = target.logits(state.drafting.last)[:, VOCABULARY]
    torch.testing.assert_close(state.along([5, 6]), own.expand(3, -1))


def test_a_draft_may_be_longer_than_the_training(target, packed):
    state = state_after(drafter_for(ReDrafter, target), packed)
    before = state.drafting.last.clone(), state.drafting.token.clone()
    tree = state.draft(StaticTree.chain(3 * STEPS))
    assert tree.is_chain and tree.num_nodes == 3 * STEPS
    assert torch.equal(state.drafting.last, before[0]) and torch.equal(state.drafting.token, before[1])


def beams(state, width, length):
    """Plain beam search: the ``width`` likeliest paths of ``length`` tokens, and their log probabilities."""
    found = {(): 0.0}
    for _ in range(length):
        grown = {}
        for path, joint in found.items():
            values, tokens = state.along(list(path))[-1].log_softmax(-1).topk(width)
            grown |= {(*path, int(VOCABULARY[t])): joint + float(v) for v, t in zip(values, tokens, strict=True)}
        found = dict(sorted(grown.items(), key=lambda each: -each[1])[:width])
    return found


def test_every_beam_is_a_path_of_the_dynamic_tree(target, packed):
    """With room for all that is seen; what fewer nodes leave out are the unlikeliest, not those that a beam needs."""
    state, width, length = state_after(drafter_for(ReDrafter, target, noise=0.3), packed), 3, 4
    everything = width + (length - 1) * width**2
    tree = state.draft(DynamicTree(length, width, everything))
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    found = beams(state, width, length)
    assert len(found) == width and set(found) <= set(paths)
    merged = {path[:depth] for path in found for depth in range(1, length + 1)}
    assert len(merged) < width * length and merged <= set(paths)


@pytest.mark.parametrize("size", [0.002, 0.04, 1.0, 30.0])
def test_embeddings_are_read_near_unit_rms_by_a_power_of_two(size):
    model = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.mul_(size / weight.pow(2).mean().sqrt())
    scale = ReDrafter.for_target(Target.from_model(model)).config()["embedding_scale"]
    assert 0.7 < size * scale < 1.42 and scale.hex().startswith("0x1.0000")


def test_what_a_constructor_leaves_out():
    drafter = ReDrafter(hidden_size=8, vocab_size=20, draft_vocab_size=20)
    shapes = {name: tuple(each.shape) for name, each in drafter.state_dict().items()}
    blocks = {f"block.layers.{layer}.{kind}" for layer in range(2) for kind in ("weight", "bias")}
    assert set(shapes) == {"rnn_w.weight", "rnn_u.weight", "rnn_u.bias", "lm_head.weight", *blocks}
    assert shapes["lm_head.weight"] == (20, 16) and drafter.ttt_steps == 5 and drafter.embedding_scale == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exit_size": 0}, "exit_size is 0: expected at least 1"),
        ({"num_layers": 0}, "num_layers is 0: expected at least 1"),
        ({"ttt_steps": 0}, "ttt_steps is 0: expected at least 1"),
        ({"embedding_scale": 3.0}, r"embedding_scale is 3.0: expected a power of two"),
        ({"embedding_scale": 0.0}, r"embedding_scale is 0.0: expected a power of two"),
    ],
)
def test_what_cannot_be_is_refused(options, said, target):
    with pytest.raises(UserError, match=said):
        ReDrafter.for_target(target, **options)


def test_costs_are_of_each_steps_share(target, packed):
    for sampled, share in ((False, 1.0), (True, 0.5)):
        drafter = drafter_for(ReDrafter, target, steps=2, decay=0.5, sample_positions=sampled, exit_size=40)
        matrices = sum(each.numel() for each in drafter.parameters() if each.ndim == 2)
        assert drafter.training_flops(64) == (2 * (1 + share) * matrices, 4 * (1 + share) * matrices)
        inputs = 2 * 32 + 2 * 32 + 2 * 40 + 40  # of the cell, the input projection, two layers, the projection
        assert drafter.activation_bytes(64, 4) == 2 * inputs * 64 * 4 * (1 + share)
    assert drafter.training_loss(packed, features_of(target, packed), target).loss > 0
