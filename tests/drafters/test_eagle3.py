"""EAGLE-3: training and decoding are the same function, documents do not see each other, vocabularies map."""

import pytest
import torch

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.batch import Batch
from specdraft.drafters.eagle3 import Eagle3
from specdraft.errors import UserError
from specdraft.losses.chunked import distillation_loss
from specdraft.targets import Features

STEPS = 4


def head_for(target, seed=0, **options):
    torch.manual_seed(seed)
    vocabulary = torch.arange(3, 97, 2)
    head = Eagle3.for_target(target, vocabulary, ttt_steps=STEPS, **options).double()
    with torch.no_grad():  # large random weights: every part of the head must matter
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


def training_logits(head, batch, features, monkeypatch):
    """The logits that each step of the training loss compares with the target, ``[n_s, Vd]`` per step."""
    seen = []

    def spy(weight, teacher, steps):
        seen.extend((step.hidden @ weight.T).detach() for step in steps)
        return distillation_loss(weight, teacher, steps)

    monkeypatch.setattr("specdraft.drafters.eagle3.distillation_loss", spy)
    head.training_loss(batch, features, head.target)
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}], ids=str
)
def test_training_logits_equal_decoding_logits(target, packed, options, monkeypatch):
    head = head_for(target, **options)
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    trained = training_logits(head, packed, features, monkeypatch)
    aligned = align(packed, STEPS)
    checked = 0
    for index, row in enumerate(aligned.rows[0].tolist()):
        first = int(aligned.starts[row])
        here = slice(first, row + 1)
        flat = Features(*(part.flatten(0, 1)[None, here] for part in features))
        state = head.start(int(aligned.tokens[first]), 64)
        head.advance(state, aligned.tokens[first + 1 : row + 2], flat)
        output = state.output
        for step in range(STEPS):
            place = (aligned.rows[step] == row).nonzero()
            if len(place) == 0:
                break
            normed = head.norm(output)
            decoded = head.lm_head(normed)[0]
            torch.testing.assert_close(decoded, trained[step][place[0, 0]], rtol=1e-10, atol=1e-10)
            checked += 1
            # Feed the true token, as training does; `draft` would feed its own choice.
            token = aligned.tokens[row + 2 + step][None]
            output = head._append(state.keys, token, normed if head.norm_output else output)
        assert index >= 0
    assert checked == sum(map(len, aligned.rows)) > 60


def test_draft_takes_the_best_tokens_of_those_logits(target, packed):
    head = head_for(target)
    ids = packed.input_ids[:1, :9]
    features = target.features(ids, packed.position_ids[:1, :9], head.layers)
    state = head.start(int(ids[0, 0]), 4)
    head.advance(state, torch.cat([ids[0, 1:], ids[0, :1]]), features)
    tree = head.draft(state, StaticTree.chain(3), Sampling(), None)
    again = head.draft(state, StaticTree.chain(3), Sampling(), None)
    assert torch.equal(tree.tokens, again.tokens) and tree.is_chain and tree.q is None
    assert state.keys.length == 9, "drafting leaves the emitted rows as they were"
    assert head.t2d[tree.tokens].all()
    best = head.lm_head(head.norm(state.output)).argmax(-1)
    assert tree.tokens[0] == head.draft_ids[best]


def test_a_sampled_draft_tells_the_distribution_that_it_came_from(target, packed):
    head = head_for(target)
    ids = packed.input_ids[:1, :9]
    features = target.features(ids, packed.position_ids[:1, :9], head.layers)
    state = head.start(int(ids[0, 0]), 16)
    head.advance(state, torch.cat([ids[0, 1:], ids[0, :1]]), features)
    sampling = Sampling(temperature=1.5, top_k=5)
    tree = head.draft(state, StaticTree.chain(4), sampling, torch.Generator().manual_seed(0))
    assert tree.q.shape == (4, 97)
    assert (tree.q[torch.arange(4), tree.tokens] > 0).all()
    assert (tree.q[:, ~head.t2d] == 0).all() and ((tree.q > 0).sum(-1) == 5).all()
    first = sampling.probabilities(head.lm_head(head.norm(state.output)))[0]
    torch.testing.assert_close(tree.q[0, head.draft_ids], first)


def test_packing_changes_nothing(target, packed):
    head = head_for(target)
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    together = head.training_loss(packed, features, target)
    sums: dict[str, torch.Tensor] = {}
    for row, here in ((0, slice(0, 9)), (0, slice(9, 23)), (1, slice(0, 20))):
        alone = Batch(*(getattr(packed, name)[row : row + 1, here] for name in Batch.__dataclass_fields__))
        loss = head.training_loss(alone, target.features(alone.input_ids, alone.position_ids, head.layers), target)
        for name, value in loss.metrics.items():
            sums[name] = sums.get(name, 0) + value
    assert together.metrics.keys() == sums.keys()
    for name, value in sums.items():
        torch.testing.assert_close(together.metrics[name], value, rtol=1e-9, atol=1e-9)
    weights = [0.8**step for step in range(STEPS)]
    mean = sum(w * sums[f"step_{s}/loss_sum"] / sums[f"step_{s}/row_total"] for s, w in enumerate(weights))
    torch.testing.assert_close(together.loss, mean, rtol=1e-9, atol=1e-9)


def test_matches_count_joint_prefixes(target, packed):
    """A later step counts only where every earlier one matched too, or predicted acceptance would be too high."""
    head = head_for(target)
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    metrics = head.training_loss(packed, features, target).metrics
    sums = [int(metrics[f"step_{s}/match_sum"]) for s in range(STEPS)]
    assert sums == sorted(sums, reverse=True)


def test_a_batch_without_answers_still_reaches_every_parameter(target, packed):
    head = head_for(target)
    packed.loss_mask.zero_()
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    result = head.training_loss(packed, features, target)
    result.loss.backward()
    assert result.loss == 0 and all((p.grad == 0).all() for p in head.parameters())


def test_training_moves_every_parameter_and_nothing_of_the_target(target, packed):
    head = head_for(target, fc_norm=True)
    before = target.embedding_weight.clone()
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    head.training_loss(packed, features, target).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert torch.equal(before, target.embedding_weight) and target.embedding_weight.grad is None
    assert not any("target" in name or "embed" in name for name in head.state_dict())


def test_draft_vocabulary_is_kept_as_offsets(target):
    head = head_for(target)
    ids = torch.arange(3, 97, 2)
    assert torch.equal(head.d2t, ids - torch.arange(len(ids))) and head.d2t.dtype == torch.int64
    assert torch.equal(head.t2d.nonzero()[:, 0], ids) and head.t2d.dtype == torch.bool
    assert torch.equal(head.draft_ids, ids)
    fresh = Eagle3.for_target(target, ids)
    torch.testing.assert_close(fresh.lm_head.weight.double(), target.head.weight[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids", [[5, 3], [3, 3], [-1, 4], [3, 97]])
def test_a_bad_draft_vocabulary_is_refused(target, ids):
    with pytest.raises(UserError, match="ascending ids below 97"):
        Eagle3.for_target(target, torch.tensor(ids))


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused(target):
    config = Eagle3.for_target(target).config()
    with pytest.raises(UserError, match="expected 1 to 97"):
        Eagle3(**{**config, "draft_vocab_size": 98})


def test_decoding_in_inference_mode_does_not_spoil_training(target, packed):
    head = head_for(target)
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    with torch.inference_mode():
        state = head.start(0, 8)
        head.advance(state, packed.input_ids[0, 1:9], Features(*(part[:1, :8] for part in features)))
        head.draft(state, StaticTree.chain(3), Sampling(), None)
    head.training_loss(packed, features, target).loss.backward()
    assert head.fc.weight.grad is not None
