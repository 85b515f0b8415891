"""DSpark: what its loss is the sum of, what it learns, and what it says before it has learned."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, embedding

from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.dflash import DSpark
from specdraft.errors import UserError
from tests.drafters.dflash.conftest import VOCABULARY, build
from tests.drafters.dflash.test_drafting import state_after
from tests.drafters.dflash.test_sequential import training_logits

LOSS = {"divergence": {"name": "ce_l1", "share": 0.1}, "step_decay": 0.5}


def dspark(target, **options) -> DSpark:
    drafter = build(target, kind=DSpark, **{"markov_rank": 6} | options)
    assert isinstance(drafter, DSpark)
    return drafter


def features_of(drafter, batch):
    return drafter.target.features(batch.input_ids, batch.position_ids, drafter.layers)


@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_the_loss_is_a_tenth_of_cross_entropy_the_l1_distance_and_the_confidences_error(
    weight, target, packed, monkeypatch
):
    drafter = dspark(target, confidence_weight=weight, **LOSS)
    asked = []
    head = drafter.confidence_head
    monkeypatch.setattr(head, "forward", lambda *given: asked.append(given) or type(head).forward(head, *given))
    result = drafter.training_loss(packed, features_of(drafter, packed), target)
    logits = training_logits(drafter, packed, monkeypatch)
    features, ids = features_of(drafter, packed), packed.input_ids.flatten()
    last, aligned = features.last.flatten(0, 1), align(packed, 5)
    hidden, embedded = asked[-1]
    expected = torch.zeros((), dtype=torch.float64)
    for step, (z, at) in enumerate(zip(logits, aligned.supervised, strict=True)):
        q = torch.zeros(len(at), 97, dtype=torch.float64).index_copy(1, VOCABULARY, z.softmax(-1))
        p = target.logits(last[at + 1 + step]).softmax(-1)
        truth = ids[at + 2 + step]
        entropy = -(q.gather(1, truth[:, None])[:, 0].log()).where(torch.isin(truth, VOCABULARY), 0)
        rows = torch.searchsorted(aligned.supervised[0], at)
        before = embedding(ids[at + 1 + step], drafter.markov_head.markov_w1.weight)
        torch.testing.assert_close(embedded[rows, step], before)
        said = torch.cat([hidden[rows, step], before], -1) @ head.proj.weight[0] + head.proj.bias
        accepted = torch.minimum(p, q).sum(-1)  # 1 - TV
        error = binary_cross_entropy(said.sigmoid(), accepted, reduction="none")
        assert result.metrics[f"step_{step}/confidence_error_sum"] == pytest.approx(
            float((said.sigmoid() - accepted).abs().sum().detach())
        )
        expected += 0.5**step * (0.1 * entropy + 0.9 * (p - q).abs().sum(-1) + weight * error).mean().detach()
    torch.testing.assert_close(result.loss.detach(), expected, rtol=1e-9, atol=0)


def test_all_but_the_frozen_projection_learns(target, packed):
    drafter = dspark(target, **LOSS).train()
    drafter.training_loss(packed, features_of(drafter, packed), target).loss.backward()
    assert {name for name, each in drafter.named_parameters() if each.grad is None} == {"lm_head.weight"}
    assert all(each.grad.abs().sum() > 0 for each in drafter.parameters() if each.requires_grad)
    names = {name for name, _ in drafter.named_parameters() if "_head." in name and "lm_head" not in name}
    assert names == {f"markov_head.markov_w{n}.weight" for n in (1, 2)} | {
        f"confidence_head.proj.{part}" for part in ("weight", "bias")
    }


def test_without_a_confidence_head_there_is_no_such_loss(target, packed):
    drafter = dspark(target, confidence_head=False)
    result = drafter.training_loss(packed, features_of(drafter, packed), target)
    assert not any("confidence" in name for name in (*result.metrics, *drafter.state_dict()))
    other = dspark(target, confidence_weight=0.0)
    assert other.training_loss(packed, features_of(other, packed), target).loss != 0


def test_the_anchor_drafts_too_and_an_untrained_table_adds_nothing(target, packed):
    drafter = dspark(target, block_size=1)
    assert drafter.num_drafts == 1
    state = state_after(drafter, packed)
    assert state.draft(StaticTree.chain(3)).num_nodes == 1
    drafter = dspark(target)
    torch.nn.init.zeros_(drafter.projection.weight)
    state = state_after(drafter, packed)
    state.draft(StaticTree.chain(5))
    for step, (_, logits) in enumerate(state.read):
        assert torch.equal(logits.flatten(), state.drafting._logits[0, step])
    fresh = DSpark.for_target(target, VOCABULARY)
    assert not fresh.projection.weight.any() and fresh.projection.weight.shape == (len(VOCABULARY), 256)
    assert fresh.markov_head.markov_w1.weight.shape == (97, 256)


def test_weights_by_confidence_read_the_corrected_logits(target, packed, monkeypatch):
    drafter = dspark(target, confidence_smoothing=0.5)
    features = features_of(drafter, packed)
    found = drafter.training_loss(packed, features, target)
    torch.nn.init.zeros_(drafter.projection.weight)
    other = drafter.training_loss(packed, features, target)
    assert found.loss != other.loss
    assert all(found.metrics[f"step_{step}/total"] == other.metrics[f"step_{step}/total"] for step in range(5))


def test_a_checkpoint_is_read_back(target, tmp_path):
    drafter = dspark(target).float()
    loaded, _ = load_drafter(save_drafter(drafter, tmp_path / "drafter", target.identity))
    assert isinstance(loaded, DSpark) and loaded.config() == drafter.config()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 0}, "block_size is 0: expected at least 1"),
        ({"markov_rank": 0}, "markov_rank is 0: expected at least 1"),
        ({"confidence_weight": -1}, "confidence_weight is -1: expected 0 or a positive number"),
    ],
)
def test_what_cannot_be_is_refused(target, options, said):
    with pytest.raises(UserError, match=said):
        DSpark.for_target(target, VOCABULARY, **options)
