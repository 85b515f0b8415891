"""The sampled distribution against plain formulas, and the chance that draws from it."""

import pytest
import torch

from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.errors import UserError
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities
from tests.decoding.trees import chance

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
    drawn = sample((scale * p).expand(20000, 6), chance(20000).uniform(0, 1)[:, 0])
    assert drawn.shape == (20000,)
    assert goodness_of_fit(drawn, p) > REJECTED
    assert goodness_of_fit(drawn, torch.tensor([0.5, 0.0, 0.27, 0.18, 0.05, 0.0])) < REJECTED


def test_sample_is_the_inverse_of_the_cumulated_distribution():
    p = torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.8749, 0.875, 0.9999], dtype=torch.float64)
    for scale in (1.0, 0.125, 4.0):
        assert sample((scale * p).expand(8, 5), numbers).tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53], ids=["least", "greatest"])
def test_no_number_draws_what_has_no_probability(number):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(2000, 50, generator=g) * (torch.rand(2000, 50, generator=g) < 0.2)
    p[:, 0] = p[:, -1] = 0.0
    p[:, 25] += 1e-30  # there is always one
    p[:1000] = p[:1000] / p[:1000].sum(-1, keepdim=True)
    first = torch.arange(50).where(p > 0, 50).amin(-1)
    last = torch.arange(50).where(p > 0, -1).amax(-1)
    drawn = sample(p, torch.full((2000,), number, dtype=torch.float64))
    assert (p.gather(1, drawn[:, None]) > 0).all()
    if number == 0:
        assert torch.equal(drawn, first)
    else:  # unless what is left is lost in the sum
        share = p.gather(1, last[:, None])[:, 0] / p.sum(-1)
        assert torch.equal(drawn[share > 1e-12], last[share > 1e-12])


def test_improbable_tokens_are_neither_lost_nor_favored():
    p = torch.full((3, 100_000), 1e-5)
    p[:, 70_000] = 3e-9  # beside the sum of 0.7 before it nothing in fp32
    start = 70_000 * float(p[0, 0]) / float(p[0].double().sum())
    step = 3e-9 / float(p[0].double().sum())
    numbers = torch.tensor([start - 0.5 * step, start + 0.5 * step, start + 1.5 * step], dtype=torch.float64)
    assert sample(p, numbers).tolist() == [69_999, 70_000, 70_001]


def test_sample_keeps_the_shape():
    p = Sampling(1.0).probabilities(LOGITS).view(1, 5, 11)
    numbers = chance(1).uniform(0, 5)
    drawn = sample(p, numbers)
    assert drawn.shape == (1, 5)
    for place in range(5):
        assert drawn[0, place] == sample(p[0, place], numbers[0, place])


CELLS = 64


def even(numbers: torch.Tensor) -> float:
    """p-value that ``[n]`` numbers lie evenly between 0 and 1."""
    return goodness_of_fit((numbers.flatten() * CELLS).long(), torch.ones(CELLS))


def independent(one: torch.Tensor, other: torch.Tensor) -> float:
    """p-value that pairs of two ``[n]`` numbers lie evenly in the square."""
    cells = ((part.flatten() * 16).long() for part in (one, other))
    return goodness_of_fit(next(cells) * 16 + next(cells), torch.ones(256))


def of_seeds(seeds: range) -> Chance:
    return Chance(torch.tensor([Chance.mixed(seed) for seed in seeds]), torch.zeros(len(seeds), dtype=torch.int64))


def test_numbers_are_uniform_over_seeds_lengths_and_numbers():
    assert even(chance(1).uniform(0, 100_000)) > REJECTED
    assert even(chance(100_000).uniform(0, 1)) > REJECTED
    assert even(of_seeds(range(50_000)).uniform(0, 1)) > REJECTED
    assert even(chance(2000, seed=7).uniform(2**20, 50)) > REJECTED
    every = chance(1000).uniform(0, 100)
    assert every.dtype == torch.float64 and every.shape == (1000, 100)
    assert 0 <= every.min() < 1e-4 and 1 - 1e-4 < every.max() < 1
    low = (every * 2**40).frac()  # the bits behind, which tokens of small probability depend on
    assert even(low) > REJECTED


def test_neighbors_are_independent():
    seeds = of_seeds(range(50_001)).uniform(0, 1)
    assert independent(seeds[:-1], seeds[1:]) > REJECTED
    numbers = chance(300).uniform(0, 201)
    assert independent(numbers[:, :-1], numbers[:, 1:]) > REJECTED  # of one text
    assert independent(numbers[:-1], numbers[1:]) > REJECTED  # of texts of neighboring lengths
    assert independent(numbers[:-1, :-1], numbers[1:, 1:]) > REJECTED
    draft = chance(300).uniform(2**20, 201)
    assert independent(numbers, draft) > REJECTED  # verification and draft
    assert independent(numbers, numbers + 1e-9) < REJECTED


def test_what_is_apart_is_independent_and_a_requests_own():
    request = chance(300)
    parts = [request, request.apart(0), request.apart(1), request.apart(0).apart(0), request.apart(1).apart(0)]
    numbers = [each.uniform(first, 100) for each in parts for first in (0, 2**20)]
    assert min(even(each) for each in numbers) > REJECTED
    pairs = [(one, other) for place, one in enumerate(numbers) for other in numbers[:place]]
    assert min(independent(one, other) for one, other in pairs) > REJECTED
    assert min(independent(one[:, 1:], other[:, :-1]) for one, other in pairs) > REJECTED
    assert len(torch.cat(numbers).unique()) == 10 * 300 * 100
    assert torch.equal(request.of(7).apart(1).uniform(0, 9), parts[2].uniform(0, 9)[7:8])


def test_no_two_requests_share_their_numbers():
    several = Chance(
        torch.tensor([Chance.mixed(seed) for seed in range(200)]).repeat_interleave(50), torch.arange(50).repeat(200)
    )
    numbers = torch.cat([several.uniform(0, 20), several.uniform(2**20, 20)], dim=1).flatten()
    assert len(numbers.unique()) == len(numbers) == 400_000


def test_a_request_draws_the_same_alone_and_in_a_batch():
    together = Chance(torch.tensor([Chance.mixed(seed) for seed in (3, 0, 3, 8)]), torch.tensor([5, 90, 6, 5]))
    numbers = together.uniform(4, 9)
    for row in range(4):
        assert torch.equal(together.of(row).uniform(4, 9), numbers[row : row + 1])
    later = Chance(together.seeds.flip(0), together.lengths.flip(0))
    assert torch.equal(later.uniform(4, 9).flip(0), numbers)
    for number in range(9):  # however many are asked for at a time
        assert torch.equal(together.uniform(4 + number, 1), numbers[:, number : number + 1])


def test_the_numbers_are_those_of_splitmix64():
    """In Python's whole numbers."""
    mask = 2**64 - 1

    def mixed(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    for seed, length, number in ((0, 0, 0), (1, 5, 3), (2**40, 100_000, 2**20), (2**63 - 1, 7, 2**21)):
        state = mixed(seed * 0x9E3779B97F4A7C15 & mask) + (length * 2**24 + number + 1) * 0x9E3779B97F4A7C15
        expected = (mixed(state & mask) >> 11) * 2.0**-53
        asked = Chance(torch.tensor([Chance.mixed(seed)]), torch.tensor([length]))
        assert asked.uniform(number, 1).item() == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_bad_settings(options, word):
    with pytest.raises(UserError, match=f"^{word} is .*: expected"):
        Sampling(**options)
