"""Trained rows stay, and rows of new tokens follow them."""

import pytest
import torch

from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.vocabulary_transfer import transfer_rows, with_vocabulary_of
from specdraft.targets import Target
from tests.fakes import tiny_llama

V, H = 400, 12


def moved(rows, seed=1):
    """The rows as a training might leave them: turned, stretched and shifted together."""
    chance = torch.Generator().manual_seed(seed)
    return rows @ torch.randn(H, H, generator=chance) + torch.randn(H, generator=chance)


def test_new_rows_begin_where_the_others_went():
    first = torch.randn(V, H, generator=torch.Generator().manual_seed(0))
    old, new = torch.arange(0, 300), torch.arange(100, V)
    rows = transfer_rows(moved(first)[old], old, first[new], new)
    assert torch.equal(rows[:200], moved(first)[100:300])
    wrong = (rows[200:] - moved(first)[300:]).norm() / moved(first)[300:].norm()
    assert wrong < 0.01 < (first[300:] - moved(first)[300:]).norm() / moved(first)[300:].norm()


def test_rows_that_never_moved_stay_where_they_are():
    first = torch.randn(V, H)
    old, new = torch.arange(0, V, 2), torch.arange(50, V)
    assert torch.equal(transfer_rows(first[old], old, first[new], new), first[new])


def test_with_few_tokens_in_both_rows_are_finite_and_with_none_as_they_were():
    first = torch.randn(V, H)
    old, new = torch.arange(0, 52), torch.arange(50, 100)
    assert transfer_rows(moved(first)[old], old, first[new], new).isfinite().all()
    assert torch.equal(transfer_rows(moved(first)[old], old, first[100:], torch.arange(100, V)), first[100:])


@pytest.mark.parametrize("kind", [Eagle3, Medusa])
def test_every_projection_and_the_vocabulary_itself(kind):
    target = Target.from_model(tiny_llama(num_hidden_layers=4))
    size, new = target.vocab_size, torch.arange(10, 50)
    trained = kind.for_target(target, torch.arange(30))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    another = with_vocabulary_of(kind.for_target(target, new), trained)
    assert another.config() == trained.config() | {"draft_vocab_size": 40}
    assert another.draft_ids.equal(new) and int(another.t2d.sum()) == 40 and len(another.t2d) == size
    state = another.state_dict()
    projections = [name for name, value in state.items() if value.shape[:1] == (40,) and name not in ("d2t", "t2d")]
    assert projections and all("lm_head" in name for name in projections)
    for name, value in trained.state_dict().items():
        if name in projections:
            assert torch.equal(state[name][:20], value[10:]) and not torch.equal(state[name][20:], value[:20])
        elif name not in ("d2t", "t2d"):
            assert torch.equal(state[name], value)


def test_the_whole_vocabulary_is_no_list():
    """Of heads that need no mapping then, in either direction."""
    target = Target.from_model(tiny_llama())
    whole, part = (Medusa.for_target(target, ids) for ids in (torch.arange(target.vocab_size), torch.arange(5, 40)))
    assert "d2t" not in with_vocabulary_of(whole, part).state_dict()
    assert torch.equal(with_vocabulary_of(part, whole).lm_heads[0].weight, whole.lm_heads[0].weight[5:40])
