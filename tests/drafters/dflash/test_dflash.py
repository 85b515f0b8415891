"""Training asks what decoding asks: every slot's logits, what they are compared with, and which blocks are drawn."""

import pytest
import torch

from specdraft.drafters.alignment import align
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.dflash import DFlash, dflash
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.drafters.alone import Alone
from tests.drafters.dflash.conftest import VOCABULARY, build
from tests.fakes import tiny_llama


def features_of(target, batch, layers):
    return target.features(batch.input_ids, batch.position_ids, layers)


def training_logits(drafter, batch, monkeypatch):
    """The logits that the loss compares with the target, ``[n_s, Vd]`` per drafted token."""
    seen = []
    real = dflash.objective

    def spy(weights, teacher, steps, divergence):
        seen.extend((step.hidden @ weights[step.head].T).detach() for step in steps)
        return real(weights, teacher, steps, divergence)

    monkeypatch.setattr(dflash, "objective", spy)
    drafter.training_loss(batch, features_of(drafter.target, batch, drafter.layers), drafter.target)
    return seen


def test_training_logits_equal_decoding_logits(drafter, target, packed, monkeypatch):
    trained = training_logits(drafter, packed, monkeypatch)
    aligned, features = align(packed, drafter.num_drafts), features_of(target, packed, drafter.layers)
    checked = 0
    for row in aligned.supervised[0].tolist():
        first = max(start for start in aligned.documents.table[1].tolist() if start <= row)
        state = Alone(drafter, int(aligned.tokens[first]))
        known = Features(*(part.flatten(0, 1)[None, first : row + 1] for part in features))
        middle = (row + 1 - first) // 2  # in two parts, as a prompt and what is emitted after it
        for low, high in ((0, middle), (middle, row + 1 - first)):
            if low < high:
                part = Features(*(each[:, low:high] for each in known))
                state.advance(aligned.tokens[first + 1 + low : first + 1 + high], part)
        path = aligned.tokens[row + 2 : row + 1 + drafter.num_drafts].tolist()
        for step, decoded in enumerate(state.along(path)):
            place = (aligned.supervised[step] == row).nonzero()[:, 0]
            if len(place):
                torch.testing.assert_close(decoded, trained[step][place[0]], rtol=1e-6, atol=1e-6)
                checked += 1
    assert checked == sum(map(len, aligned.supervised)) > 60


@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy"])
def test_the_loss_compares_each_slot_with_the_token_that_it_drafts(divergence, target, packed, monkeypatch):
    drafter = build(target, divergence=divergence, step_decay=0.5)
    features = features_of(target, packed, drafter.layers)
    result = drafter.training_loss(packed, features, target)
    logits = training_logits(drafter, packed, monkeypatch)
    last, ids = features.last.flatten(0, 1), packed.input_ids.flatten()
    expected = torch.zeros((), dtype=torch.float64)
    for step, (z, at) in enumerate(zip(logits, align(packed, drafter.num_drafts).supervised, strict=True)):
        log_q = z.log_softmax(-1)
        if divergence == "forward_kl":  # slot 1 drafts the token after the emitted one
            log_p = target.logits(last[at + 1 + step])[:, VOCABULARY].log_softmax(-1)
            values = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            values = -(log_q * (ids[at + 2 + step][:, None] == VOCABULARY)).sum(-1)
        expected += 0.5**step * values.mean()
    torch.testing.assert_close(result.loss.detach(), expected, rtol=1e-9, atol=0)


def test_what_is_learned_and_what_is_not(target, packed):
    drafter = build(target).train()
    drafter.training_loss(packed, features_of(target, packed, drafter.layers), target).loss.backward()
    without = {name for name, parameter in drafter.named_parameters() if parameter.grad is None}
    assert without == {"lm_head.weight"}
    assert all(parameter.grad.abs().sum() > 0 for parameter in drafter.parameters() if parameter.requires_grad)
    trained = build(target, projection="target").train()
    trained.training_loss(packed, features_of(target, packed, trained.layers), target).loss.backward()
    assert trained.lm_head.weight.grad.abs().sum() > 0


def test_the_projection_begins_as_the_targets_own_rows(target):
    drafter = DFlash.for_target(target, VOCABULARY)
    assert torch.equal(drafter.lm_head.weight.double(), target.head.weight[VOCABULARY].float().double())


def test_drawn_blocks_estimate_the_whole_loss(target, packed):
    """In expectation, and with the positions of every slot among those of the slot before."""
    whole = build(target).train()
    features = features_of(target, packed, whole.layers)
    drawn = build(target, num_anchors=5).train()
    expected = whole.training_loss(packed, features, target)
    torch.manual_seed(0)
    found = [drawn.training_loss(packed, features, target) for _ in range(200)]
    losses = torch.stack([each.loss.detach() for each in found])
    error = losses.std() / len(losses) ** 0.5
    assert (losses.mean() - expected.loss.detach()).abs() < 4 * error
    totals = torch.stack([each.metrics["step_0/total"] for each in found]).double()
    share = 2 * 5 / int(packed.before_learned().sum())  # 5 of each of two sequences
    assert totals.mean() == pytest.approx(share * align(packed, 1).counts[0], rel=0.15)
    assert (
        drawn.eval().training_loss(packed, features, target).loss
        == whole.eval().training_loss(packed, features, target).loss
    )  # validation takes all


def test_weights_by_confidence_estimate_the_same_when_blocks_are_drawn(target, packed):
    features = features_of(target, packed, build(target).layers)
    options = {"confidence_smoothing": 0.5}
    expected = build(target, **options).train().training_loss(packed, features, target).loss.detach()
    drawn = build(target, num_anchors=5, **options).train()
    torch.manual_seed(0)
    losses = torch.stack([drawn.training_loss(packed, features, target).loss.detach() for _ in range(200)])
    assert (losses.mean() - expected).abs() < 4 * losses.std() / len(losses) ** 0.5
    plain = build(target).train().training_loss(packed, features, target).loss.detach()
    assert (plain - expected).abs() > 1e-3


def test_documents_that_count_alike(target, packed):
    drafter = build(target, sequence_mean=True)
    counts = drafter.count_supervised(packed)
    assert counts.tolist() == align(packed, drafter.num_drafts, by_document=True).counts
    loss = drafter.training_loss(packed, features_of(target, packed, drafter.layers), target).loss
    assert loss != build(target).training_loss(packed, features_of(target, packed, drafter.layers), target).loss


def test_a_checkpoint_is_read_back(drafter, target, tmp_path, packed):
    drafter = drafter.float()
    loaded, _ = load_drafter(save_drafter(drafter, tmp_path / "drafter", target.identity))
    assert isinstance(loaded, DFlash) and loaded.config() == drafter.config()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 1}, r"block_size is 1: expected at least 2"),
        ({"num_layers": 0}, r"num_layers is 0: expected at least 1"),
        ({"num_anchors": 0}, r"num_anchors is 0: expected at least 1"),
        ({"mask_token": 97}, r"mask_token is 97: expected a token of 0 to 96"),
        ({"projection": "scratch"}, r"projection is 'scratch': expected frozen or target"),
        ({"confidence_smoothing": 2.0}, r"confidence_smoothing is 2\.0"),
        ({"divergence": "none"}, r"none"),
    ],
)
def test_what_cannot_be_is_refused(target, options, said):
    with pytest.raises(UserError, match=said):
        DFlash.for_target(target, VOCABULARY, **options)


def test_costs_grow_with_slots_layers_and_anchors():
    """The planner's figures beside what a step really computes (FLOPs of its products)."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.drafters.drafts import whole as whole_batch

    small = Target.from_model(tiny_llama(97, 128, num_hidden_layers=4))
    batch = whole_batch(torch.randint(0, 97, (96,), generator=torch.Generator().manual_seed(0)).tolist())
    for options in ({}, {"block_size": 3}, {"num_layers": 4}):
        drafter = DFlash.for_target(small, **{"num_layers": 2, "block_size": 6} | options).train()
        features = features_of(small, batch, drafter.layers)
        with FlopCounterMode(display=False) as counter:
            drafter.training_loss(batch, features, small).loss.backward()
        teacher = 2.0 * small.head.weight.numel()
        counted = counter.get_total_flops() / 96 - teacher
        assert sum(drafter.training_flops(96)) == pytest.approx(counted, rel=0.25), (
            options
        )  # a chunk masks what it need not see
    few = DFlash.for_target(small, num_anchors=12)
    every = DFlash.for_target(small)
    assert sum(few.training_flops(96)) < 0.3 * sum(every.training_flops(96))
    assert few.activation_bytes(96, 4) < 0.4 * every.activation_bytes(96, 4)
