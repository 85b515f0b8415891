"""The sampled distribution against plain formulas."""

import pytest
import torch

from specdraft.decoding.sampling import Sampling, sample
from specdraft.errors import UserError
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities

LOGITS = 3 * torch.randn(5, 11, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (1, 1.0), (99, 1.0), (0, 0.7), (0, 1e-6), (6, 0.9)])
def test_probabilities_equal_plain_formulas(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    p = sampling.probabilities(LOGITS)
    expected = torch.stack([plain_probabilities(row, sampling) for row in LOGITS])
    torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(p == 0, expected == 0)


def test_top_p_keeps_the_token_that_reaches_it_and_is_measured_after_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert Sampling(1.0, top_p=0.5).probabilities(logits).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # Of the two that top-k keeps, the first alone has 4/7 of the mass.
    assert Sampling(1.0, top_k=2, top_p=0.5).probabilities(logits).tolist() == [1, 0, 0, 0]


def test_half_precision_logits_are_sampled_in_single_precision():
    logits = LOGITS.bfloat16()
    p = Sampling(0.7).probabilities(logits)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, (logits.float() / 0.7).softmax(-1))


def test_greedy_is_argmax():
    assert Sampling().greedy
    assert not Sampling(0.01).greedy
    p = Sampling(top_k=3, top_p=0.5).probabilities(LOGITS)
    assert torch.equal(p.argmax(-1), LOGITS.argmax(-1))
    assert torch.equal(p.sum(-1), torch.ones(5))
    assert torch.equal(p.max(-1).values, torch.ones(5))


def test_low_temperature_tends_to_greedy_without_overflow():
    assert torch.equal(Sampling(1e-6).probabilities(LOGITS), Sampling().probabilities(LOGITS))


@pytest.mark.parametrize("scale", [1.0, 0.01])  # residuals do not sum to one
def test_sample_follows_the_weights(scale):
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    drawn = sample((scale * p).expand(20000, 6), torch.Generator().manual_seed(0))
    assert drawn.shape == (20000,)
    assert goodness_of_fit(drawn, p) > REJECTED
    assert goodness_of_fit(drawn, torch.tensor([0.5, 0.0, 0.27, 0.18, 0.05, 0.0])) < REJECTED


def test_sample_keeps_the_shape_and_follows_the_seed():
    p = Sampling(1.0).probabilities(LOGITS).view(1, 5, 11)
    first = sample(p, torch.Generator().manual_seed(3))
    assert first.shape == (1, 5)
    assert torch.equal(first, sample(p, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_bad_settings(options, word):
    with pytest.raises(UserError, match=f"^{word} is .*: expected"):
        Sampling(**options)
