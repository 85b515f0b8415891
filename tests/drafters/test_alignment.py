"""The one statement of which row predicts what, on examples small enough to check by hand."""

import pytest
import torch

from specdraft.drafters.alignment import StepDecay, align, count_supervised
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.targets.batch import Batch


def batch(documents, mask, width):
    """One row per list of documents; a document is its length; padding fills the row."""
    rows = []
    for lengths in documents:
        ids = [d for d, n in enumerate(lengths) for _ in range(n)]
        positions = [p for n in lengths for p in range(n)]
        rest = width - len(ids)
        rows.append((positions + list(range(rest)), ids + [-1] * rest))
    tokens = torch.arange(len(rows) * width).view(len(rows), width)
    return Batch(
        tokens, torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows]), torch.tensor(mask).bool()
    )


def test_rows_start_behind_an_emitted_token_and_end_with_the_answer():
    # prompt 0 1 2 | answer 3 4 5 6
    aligned = align(batch([[7]], [[0, 0, 0, 1, 1, 1, 1]], 7), 4)
    # Row 2 (the last prompt token) is the first: token 3 was emitted by the target, the head drafts 4.
    assert [each.tolist() for each in aligned.supervised] == [[2, 3, 4], [2, 3], [2], []]


def test_the_prompt_is_never_supervised():
    aligned = align(batch([[6]], [[0, 0, 0, 0, 0, 1]], 6), 2)
    assert [each.tolist() for each in aligned.supervised] == [[], []]


def test_no_step_crosses_a_document_border_or_a_row_of_the_batch():
    mask = [[1] * 8, [1] * 8]
    aligned = align(batch([[4, 4], [3, 3]], mask, 8), 3)
    assert aligned.documents.table[1].tolist() == [0, 4, 8, 11, 14, 16]
    assert [each.tolist() for each in aligned.supervised] == [[0, 1, 4, 5, 8, 11], [0, 4], []]


def test_a_second_turn_is_not_reached_through_the_prompt_between():
    aligned = align(batch([[8]], [[0, 1, 1, 1, 0, 1, 1, 1]], 8), 3)
    assert [each.tolist() for each in aligned.supervised] == [[0, 1, 4, 5], [0, 4], []]


def test_supervised_padding_is_ignored():
    aligned = align(batch([[3]], [[1, 1, 1, 1, 1, 1]], 6), 1)
    assert [each.tolist() for each in aligned.supervised] == [[0]]


def test_where_documents_count_alike_the_shares_of_each_add_up_to_one():
    # Of the first all but the prompt, of the second two, of the third nothing, of the fourth all.
    given = batch([[7, 4], [3, 5]], [[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]], 11)
    aligned = align(given, 3, by_document=True)
    rows = [each.tolist() for each in aligned.supervised]
    assert rows == [[1, 2, 3, 4, 7, 8, 14, 15, 16], [1, 2, 3, 7, 14, 15], [1, 2, 14]]
    quarters, thirds, halves = [1 / 4] * 4, [1 / 3] * 3, [1 / 2] * 2
    expected = [[*quarters, *halves, *thirds], [*thirds, 1, *halves], [*halves, 1]]
    for shares, wanted in zip(aligned.shares, expected, strict=True):
        assert shares.tolist() == pytest.approx(wanted)
    assert aligned.counts == count_supervised(given, 3, by_document=True).tolist() == [3, 3, 2]
    plain = align(given, 3)
    assert plain.shares is None and plain.counts == [9, 6, 3]


def test_documents_count_alike_in_samples_too():
    given = batch([[40, 10]], [[1] * 50], 50)
    whole = align(given, 2, StepDecay(1.0), by_document=True)
    torch.manual_seed(0)
    sampled = align(given, 2, StepDecay(0.5, sampled=True), by_document=True)
    assert sampled.counts == whole.counts == [2, 2]
    share = dict(zip(whole.supervised[1].tolist(), whole.shares[1].tolist(), strict=True))
    assert 0 < len(sampled.supervised[1]) < len(whole.supervised[1])
    assert sampled.shares[1].tolist() == [share[row] for row in sampled.supervised[1].tolist()]


def test_documents_and_their_queries():
    # Of the first all but the prompt, of the second nothing, of the third all; then padding.
    aligned = align(batch([[6, 3], [4]], [[0, 0, 0, 1, 1, 1, 0, 0, 0], [1] * 9], 9), 2)
    assert aligned.supervised[0].tolist() == [2, 3, 9, 10]
    table, longest, packed = aligned.documents
    assert table.tolist() == [[0, 4, 4, 8, 8], [0, 6, 9, 13, 18]] and table.dtype == torch.int32
    assert (longest, packed, aligned.length) == (6, 8, 6)
    nothing = align(batch([[6, 3]], [[0] * 9], 9), 2)
    assert nothing.documents.table.tolist() == [[0, 6, 6], [0, 6, 9]] and nothing.counts == [0, 0]


def long_text(tokens=20_000):
    positions = torch.arange(tokens)[None]
    return Batch(positions, positions, torch.zeros_like(positions), torch.ones_like(positions, dtype=torch.bool))


def test_a_sample_is_a_share_of_every_step_among_those_of_the_step_before():
    whole, sample = align(long_text(), 4), align(long_text(), 4, StepDecay(0.6, sampled=True))
    assert sample.counts == whole.counts == [len(each) for each in whole.supervised]
    assert torch.equal(sample.supervised[0], whole.supervised[0])
    for step in range(1, 4):
        at, before = sample.supervised[step], sample.supervised[step - 1]
        assert torch.isin(at, before).all() and torch.equal(at, at.sort().values)
        expected = 0.6**step
        assert len(at) / whole.counts[step] == pytest.approx(expected, abs=4 * (expected / 20_000) ** 0.5)


def test_a_sample_is_that_of_the_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        return align(long_text(100), 3, StepDecay(0.5, sampled=True)).supervised[2].tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_without_a_sample_nothing_is_drawn():
    before = torch.get_rng_state()
    align(long_text(100), 3, StepDecay(0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_and_shares():
    weighed, sampled = StepDecay(0.5), StepDecay(0.5, sampled=True)
    assert [weighed.weight(step) for step in range(3)] == [sampled.share(step) for step in range(3)] == [1, 0.5, 0.25]
    assert [weighed.share(step) for step in range(3)] == [sampled.weight(step) for step in range(3)] == [1, 1, 1]
    assert StepDecay(1.5).weight(1) == 1.5
    assert {StepDecay(base, sampled=True).share(1) for base in (0, 1)} == {0, 1}
    for base in (-0.1, 1.1):
        with pytest.raises(UserError, match=f"with sample_positions a decay of {base} is a share: expected a number"):
            StepDecay(base, sampled=True)


FAMILIES = {
    "eagle": lambda target, **options: Eagle.for_target(target, ttt_steps=3, step_decay=0.6, **options),
    "eagle3": lambda target, **options: Eagle3.for_target(target, ttt_steps=3, step_decay=0.6, **options),
    "medusa": lambda target, **options: Medusa.for_target(target, num_heads=3, head_decay=0.6, **options),
    "hydra": lambda target, **options: Hydra.for_target(target, num_heads=3, head_decay=0.6, **options),
    "redrafter": lambda target, **options: ReDrafter.for_target(target, ttt_steps=3, step_decay=0.6, **options),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_samples_is_on_average_the_whole_loss(family, target, packed):
    """So are its gradients, and the metrics of every step."""
    torch.manual_seed(0)
    whole = FAMILIES[family](target).double()
    sampling = FAMILIES[family](target, sample_positions=True).double()
    sampling.load_state_dict(whole.state_dict())
    features = packed.features(target, whole.layers)
    totals = (2.0 * count_supervised(packed, 3)).tolist()  # as of a larger batch

    def drawn(drafter):
        result = drafter.training_loss(packed, features, target, totals)
        parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(result.loss, parameters)
        norms = [(gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True)]
        means = [result.metrics[f"step_{step}/loss_sum"] for step in range(3)]
        return torch.stack([result.loss.detach(), *norms, *means]), result.metrics

    directions = [torch.randn_like(parameter) for parameter in whole.parameters() if parameter.requires_grad]
    expected, metrics = drawn(whole)
    shares = torch.tensor([1.0] * (1 + len(directions)) + [0.6**step for step in range(3)])
    found = torch.stack([drawn(sampling)[0] for _ in range(150)])
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - shares * expected).abs() <= 4 * error + 1e-9).all() and error[0] > 0
    counted = drawn(sampling)[1]
    assert counted["step_0/total"] == metrics["step_0/total"] and counted["step_2/total"] < metrics["step_2/total"]
    torch.testing.assert_close(drawn(sampling.eval())[0], expected, rtol=0, atol=0)  # validation takes all


@pytest.mark.parametrize("family", FAMILIES)
def test_the_total_of_a_sample_is_what_it_is_drawn_from(family, target, packed):
    drafter = FAMILIES[family](target, sample_positions=True).double()
    features = packed.features(target, drafter.layers)
    torch.manual_seed(1)
    alone = drafter.training_loss(packed, features, target).loss
    torch.manual_seed(1)
    given = drafter.training_loss(packed, features, target, count_supervised(packed, 3).tolist()).loss
    assert alone == given


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_sample_spares_is_counted(family, target):
    whole, sampling = FAMILIES[family](target), FAMILIES[family](target, sample_positions=True)
    flops = [pair for drafter in (whole, sampling) for pair in [drafter.training_flops(64)]]
    ratios = [part / all_of_it for part, all_of_it in zip(flops[1], flops[0], strict=True)]
    # Heads of Hydra differ in size, and the fusion of EAGLE-3 runs once.
    assert ratios == pytest.approx([(1 + 0.6 + 0.36) / 3] * 2, rel=0.1)
    assert "sample_positions" in type(whole).training_options and not whole.decay.sampled
