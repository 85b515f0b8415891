"""Independent drafts: training and decoding are the same function, starts hold what they promise."""

import copy

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.objective import objective
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.alone import Alone
from tests.drafters.drafts import CLOSE, LORA, PROMPT, draft_for, features_of, logits_of, noisy, whole
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def training_logits(draft, batch, target, monkeypatch) -> torch.Tensor:
    """The logits ``[n, V]`` that the loss compares with the target's."""
    seen = []

    def spy(weights, teacher, steps, divergence):
        seen.append((steps[0].hidden @ weights[0].T).detach())
        return objective(weights, teacher, steps, divergence)

    with monkeypatch.context() as patch:
        patch.setattr("specdraft.drafters.draft_model.objective", spy)
        draft.training_loss(batch, features_of(target, batch), target)
    return seen[0]


def begun(draft, tokens):
    state = Alone(draft, tokens[0])
    state.advance(torch.tensor(tokens[1:]))
    return state


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gemma2", "granite", "cohere"])
def test_training_logits_equal_decoding_logits(name, monkeypatch):
    """In rounds that accept nothing, some, or all of a draft, whose last token no draft has read."""
    target = Target.from_model(FAMILIES[name].build())
    draft = draft_for(target, copy_layers=[1, 2])
    text, decoded = list(PROMPT), []
    state = begun(draft, text)
    for accepted in (4, 0, 2, 4, 4, 1):
        tree = state.draft(StaticTree.chain(4))
        decoded += [(len(text) - 1 + depth, z.flatten()) for depth, (_, z) in enumerate(state.read[: accepted + 1])]
        emitted = [*tree.tokens[0, :accepted].tolist(), len(text) % V]
        state.advance(torch.tensor(emitted))
        text += emitted
    trained = training_logits(draft, whole(text), target, monkeypatch)
    assert len(trained) == len(text) - 1 and len(decoded) == 4 + 1 + 3 + 4 + 4 + 2
    for row, logits in decoded:
        torch.testing.assert_close(logits, trained[row], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2"])
@pytest.mark.parametrize("shape", [StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))), DynamicTree(4, 3, 12)])
def test_a_node_of_a_tree_is_read_like_its_path(name, shape, monkeypatch):
    target = Target.from_model(FAMILIES[name].build())
    draft = draft_for(target, copy_layers=2)
    state = begun(draft, PROMPT)
    state.draft(shape)
    above, checked = [[]], 0
    for level, logits in state.read[1:]:
        nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
        above = [[*above[parent], token] for parent, token in nodes]
        for path, row in zip(above, logits[0], strict=True):
            trained = training_logits(draft, whole([*PROMPT, *path, 0]), target, monkeypatch)
            torch.testing.assert_close(row, trained[-1], **CLOSE)
            checked += 1
    assert checked >= 3


def test_drafting_leaves_the_state_as_it_was(target):
    state = begun(draft_for(target), PROMPT)
    cache, last = state.drafting.cache, state.drafting.last.clone()
    held = [part[:, :, : len(PROMPT)].clone() for layer in cache.layers for part in (layer.keys, layer.values)]
    first, again = (state.draft(DynamicTree(3, 3, 8)) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.parents, again.parents)
    after = [part[:, :, : len(PROMPT)] for layer in cache.layers for part in (layer.keys, layer.values)]
    assert all(map(torch.equal, held, after)) and torch.equal(state.drafting.last, last)


def test_a_sampled_draft_tells_the_distribution_that_it_came_from(target):
    state = begun(draft_for(target), PROMPT)
    sampling = Sampling(temperature=1.5, top_k=5)
    tree = state.draft(StaticTree.chain(3), sampling)
    read = torch.stack([logits.flatten() for _, logits in state.read])
    torch.testing.assert_close(tree.q[0], sampling.probabilities(read))
    assert (tree.q[0, torch.arange(3), tree.tokens[0]] > 0).all()


# --- the loss --------------------------------------------------------------------------------------------------------


def test_packing_changes_nothing(target, packed):
    draft = draft_for(target)
    together = draft.training_loss(packed, features_of(target, packed), target)
    sums = {}
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        for name, value in draft.training_loss(alone, features_of(target, alone), target).metrics.items():
            sums[name] = sums.get(name, 0) + value
    assert together.metrics.keys() == sums.keys() and sums["step_0/total"] == 6 + 9 + 6 + 7
    for name, value in sums.items():
        torch.testing.assert_close(together.metrics[name], value, **CLOSE)
    torch.testing.assert_close(together.loss, sums["step_0/loss_sum"] / sums["step_0/total"], **CLOSE)


def test_the_loss_is_the_divergence_from_the_target_at_the_same_row(target, packed):
    draft = draft_for(target)
    result = draft.training_loss(packed, features_of(target, packed), target)
    expected, matched = [], 0
    for row in range(2):
        for t in range(22):
            document = packed.document_ids[row, t]
            if not packed.loss_mask[row, t + 1] or packed.document_ids[row, t + 1] != document:
                continue
            ids = packed.input_ids[row, : t + 1][packed.document_ids[row, : t + 1] == document][None]
            log_p, log_q = (model(ids).logits[0, -1].log_softmax(-1) for model in (target.model, draft.model))
            expected.append((log_p.exp() * (log_p - log_q)).sum())
            matched += int(log_p.argmax() == log_q.argmax())
    torch.testing.assert_close(result.loss, torch.stack(expected).mean(), **CLOSE)
    assert result.metrics["step_0/match_sum"] == matched


@pytest.mark.parametrize("tied", [True, False])
def test_training_moves_every_weight_and_nothing_of_the_target(tied, packed):
    target = Target.from_model(tiny_llama(97, tie_word_embeddings=tied).double())
    draft = draft_for(target)
    before = copy.deepcopy(target.model.state_dict())
    draft.training_loss(packed, features_of(target, packed), target).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
    assert len(list(draft.parameters())) == len(list(target.model.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


def test_a_batch_without_answers_still_reaches_every_weight(target, packed):
    draft = draft_for(target)
    packed.loss_mask.zero_()
    result = draft.training_loss(packed, features_of(target, packed), target)
    result.loss.backward()
    assert result.loss == 0 and all((p.grad == 0).all() for p in draft.parameters())


@pytest.mark.parametrize(
    "divergence",
    ["reverse_kl", "jsd", "total_variation", {"name": "lk_hybrid", "eta": 10.0}, "cross_entropy"],
    ids=str,
)
def test_divergences(target, packed, divergence):
    draft = draft_for(target, divergence=divergence)
    result = draft.training_loss(packed, features_of(target, packed), target)
    metrics = result.metrics
    rows = metrics["step_0/total"]
    if divergence == "cross_entropy":
        logits = draft.model(packed.input_ids[1:, :20]).logits[0]
        learnt = packed.loss_mask[1, 1:20]
        alone = Batch(*(getattr(packed, name)[1:, :20] for name in Batch.__dataclass_fields__))
        loss = draft.training_loss(alone, features_of(target, alone), target).loss
        expected = torch.nn.functional.cross_entropy(logits[:-1][learnt], alone.input_ids[0, 1:][learnt])
        torch.testing.assert_close(loss, expected, **CLOSE)
    if divergence == "total_variation":
        torch.testing.assert_close(result.loss, 1 - metrics["step_0/alpha_sum"] / rows, **CLOSE)
    result.loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in draft.parameters())


# --- checkpoints and refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tied, tmp_path):
    target = Target.from_model(tiny_llama(tie_word_embeddings=tied))
    draft = DraftModel.for_target(target, copy_layers=1)
    assert ("model.lm_head.weight" in draft.state_dict()) == (not tied)
    save_drafter(draft, tmp_path / "drafter", target.identity)
    loaded, _ = load_drafter(tmp_path / "drafter")
    assert torch.equal(logits_of(loaded), logits_of(draft))
    assert loaded.config() == draft.config()
    # DeepSpeed knows parameters by their names alone.
    assert set(draft.state_dict()) == {name for name, _ in draft.named_parameters()}
    assert len(list(loaded.parameters())) == len(list(draft.parameters()))


def test_a_state_within_another_module_comes_back(target):
    """As Lightning's checkpoints hold it."""
    first, second = (torch.nn.ModuleDict({"drafter": draft_for(Target.from_model(tiny_llama()))}) for _ in range(2))
    noisy(second["drafter"], seed=1)
    assert "drafter.model.lm_head.weight" not in first.state_dict()
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits_of(first["drafter"]), logits_of(second["drafter"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "nothing"}, "start is 'nothing': expected one of layers, scratch, checkpoint"),
        ({"lora": LORA}, "lora adapts a trained checkpoint"),
        ({"copy_layers": 7}, "copy_layers is 7: expected 1 to 6"),
        ({"copy_layers": 0}, "copy_layers is 0"),
        ({"copy_layers": [2, 1]}, r"copy_layers is \[2, 1\]"),
        ({"copy_layers": [6]}, r"copy_layers is \[6\]"),
        ({"start": "scratch", "shape": {"width": 3}}, "which has no width"),
        ({"start": "scratch", "shape": {"num_hidden_layers": 0}}, "at least 1 layer"),
        ({"start": "scratch", "shape": {"num_attention_heads": "x"}}, "transformers cannot build the draft"),
        ({"start": "scratch", "shape": {"vocab_size": 50}}, "a vocabulary of 50 tokens: expected the target's, 97"),
        ({"draft_vocabulary": torch.arange(50)}, "expected model.draft_vocab_size=null"),
        ({"on_policy": 1.5}, "on_policy is 1.5"),
        ({"on_policy": 0.5, "divergence": "cross_entropy"}, "on_policy .*cross_entropy"),
        ({"divergence": "no_such"}, "no_such"),
    ],
    ids=str,
)
def test_bad_options_are_refused(target, options, message):
    with pytest.raises(UserError, match=message):
        DraftModel.for_target(target, **options)


@pytest.mark.parametrize(
    "config",
    [
        FAMILIES["gemma3"].build().config.to_dict(),  # a soft-cap
        {"model_type": "phi", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4},  # a bias
    ],
    ids=lambda config: config["model_type"],
)
def test_a_head_that_the_loss_cannot_fuse_is_refused(config):
    with pytest.raises(UserError, match="is not a plain projection"):
        DraftModel(config)


# --- through the decoder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shape", [4, DynamicTree(3, 3, 9), StaticTree(((0,), (1,), (0, 0), (1, 0)))], ids=str)
def test_greedy_decoding_is_lossless(shape, batch_size):
    target = Target.from_model(tiny_llama())
    draft = DraftModel.for_target(target, copy_layers=[1])
    prompts = random_prompts(4, (5, 11, 8))
    results = Decoder(target, draft, shape).generate_batch(prompts, 20, batch_size)
    assert [result.tokens for result in results] == transformers_greedy(target.model, prompts, 20)
    accepted = [count for result in results for count in result.accepted]
    assert 0 < sum(accepted) < len(accepted) * 3, "drafts are sometimes right and sometimes wrong"
