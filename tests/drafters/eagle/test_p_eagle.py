"""What P-EAGLE adds to EAGLE-3: learned masks, shares of positions with a floor. The rest is asked of all variants."""

import pytest
import torch

from specdraft.drafters.alignment import StepDecay
from specdraft.drafters.eagle import Eagle3, PEagle
from specdraft.errors import UserError

VOCABULARY = torch.arange(3, 97, 2)


def test_the_first_step_is_eagle3s_and_the_later_ones_read_masks_alone(target, packed):
    torch.manual_seed(0)
    parallel = PEagle.for_target(target, VOCABULARY, mask_token=5, ttt_steps=3).double()
    plain = Eagle3.for_target(target, VOCABULARY, ttt_steps=3).double()
    plain.load_state_dict({name: value for name, value in parallel.state_dict().items() if name != "mask_hidden"})
    features = packed.features(target, plain.layers)
    one, other = (head.training_loss(packed, features, target).metrics for head in (parallel, plain))
    assert one["step_0/loss_sum"] == other["step_0/loss_sum"]
    assert one["step_1/loss_sum"] != other["step_1/loss_sum"]
    read = []  # later steps know nothing of the text that they are to draft
    real = parallel.read
    parallel.read = lambda tokens, *rest: read.append(tokens.clone()) or real(tokens, *rest)
    parallel.training_loss(packed, features, target)
    assert [bool((tokens == 5).all()) for tokens in read] == [False, True, True]


def test_the_mask_is_learned_by_its_hidden_states(target, packed):
    torch.manual_seed(0)
    head = PEagle.for_target(target, VOCABULARY, mask_token=5, fc_norm=True).double()
    head.training_loss(packed, packed.features(target, head.layers), target).loss.backward()
    assert head.mask_hidden.shape == (1, 1, 3 * target.hidden_size) and head.mask_hidden.grad.abs().min() > 0


def test_a_step_learns_from_ever_fewer_positions_down_to_a_fifth(target):
    head = PEagle.for_target(target, VOCABULARY, step_decay=0.7, sample_positions=True)
    shares = [head.decay.share(step) for step in range(7)]
    assert shares == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2])
    assert {head.decay.weight(step) for step in range(7)} == {1.0}
    weighed = StepDecay(0.7, floor=0.2)
    assert [weighed.weight(step) for step in range(7)] == pytest.approx(shares)


def test_a_mask_that_is_no_token_is_refused(target):
    with pytest.raises(UserError, match=r"mask_token is 97: expected a token of 0 to 96"):
        PEagle.for_target(target, VOCABULARY, mask_token=97)
