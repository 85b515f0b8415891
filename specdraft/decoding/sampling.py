"""Sampling settings, the distribution that they make of logits, and the chance that draws from it.

B = requests, V = vocabulary."""

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.decoding.grammar import Grammar


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token; of those that ``grammar`` allows.

    Logits of tokens that prompt or answer have are divided by ``repetition_penalty`` where they are positive, else
    multiplied by it (CTRL, 1909.05858, section 4.1); from those of tokens that the answer has,
    ``presence_penalty`` is taken once and ``frequency_penalty`` for every time. ``truncates_drafts``: drafts that are
    sampled leave out what top-k and top-p do; else they are drawn with the temperature alone, as vLLM draws them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: "Grammar | None" = None
    truncates_drafts: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}: expected 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: expected 0 (off) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: expected a number above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            said = f"repetition_penalty is {self.repetition_penalty}"
            raise UserError(f"{said}: expected 1 (off) or another positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(f"{name} is {getattr(self, name)}: expected 0 (off) or another number from -2 to 2")

    @property
    def penalized(self) -> bool:
        """Whether what a text says changes what may come."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __str__(self) -> str:
        """All that is not neutral, as "temperature 0.6, top_k 20"; neither the grammar nor how drafts are drawn."""
        said = [f"temperature {self.temperature:g}"]
        for each in fields(self)[1:-2]:
            if (value := getattr(self, each.name)) != each.default:
                said.append(f"{each.name} {value:g}")
        return ", ".join(said)

    @property
    def truncated(self) -> bool:
        """Whether tokens are left out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    def drafting(self, *, truncates: bool) -> "Sampling":
        """With sampled drafts that leave out what it does, or do not; where it leaves out nothing they are the same."""
        return replace(self, truncates_drafts=truncates or not self.truncated)

    @property
    def of_drafts(self) -> "Sampling":
        """How the drafter's own distributions are sampled."""
        return self if self.truncates_drafts else replace(self, top_k=0, top_p=1.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled: fp32 ``[..., V]`` from logits ``[..., V]``, zeros outside top-k and top-p;
        greedy, the one-hot of the argmax. Drafts and verification both call this, so that q is what was really sampled
        and p what the target would have sampled (Leviathan et al., 2211.17192, section 2.2)."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            kth = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, index = p.sort(dim=-1, descending=True, stable=True)
            # The first token whose inclusion reaches top_p stays; what came before it stays with it.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            ordered = ordered.masked_fill(outside, 0.0)
            p = torch.zeros_like(p).scatter(-1, index, ordered)
            p = p / p.sum(-1, keepdim=True)
        return p


def sample(p: Tensor, uniform: Tensor) -> Tensor:
    """The token ids ``[...]`` at ``uniform [...]``, in [0, 1), of the cumulated ``p [..., V]`` (non-negative; need not
    sum to one). Sums are in fp64, so that a token of tiny probability is neither lost nor favored."""
    reached = p.double().cumsum(-1)
    drawn = torch.searchsorted(reached, (uniform * reached[..., -1])[..., None], right=True)[..., 0]
    return drawn.clamp_(max=p.shape[-1] - 1)


_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DRAWS = 2**24  # of a request at one length of its text
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Chance:
    """Uniform numbers that depend on nothing but a request's seed, the length of its text and a number: SplitMix64 as a
    counter-based generator. So a request is given the same draws whatever it is decoded beside, and those of all
    requests are made together. seeds: mixed ones ``[B]`` int64. lengths: tokens of each text, ``[B]``."""

    seeds: Tensor
    lengths: Tensor

    @classmethod
    def mixed(cls, seed: int) -> int:
        """A seed as ``seeds`` holds it: neighbors become strangers."""
        return _signed(_mix(seed * _GAMMA & _MASK))

    def of(self, row: int) -> "Chance":
        """That of one request."""
        return Chance(self.seeds[row : row + 1], self.lengths[row : row + 1])

    def apart(self, number: int) -> "Chance":
        """Other numbers of the same requests, independent of these and of those apart by another ``number`` from 0 on:
        what several draw beside each other."""
        below = _signed(-(number + 1) * _GAMMA & _MASK)  # numbers below 0, which ``uniform`` never gives
        return Chance(_mixed(self.seeds + below), self.lengths)

    def uniform(self, first: int, count: int) -> Tensor:
        """Numbers ``first`` to ``first + count`` of every request, fp64 ``[B, count]`` in [0, 1)."""
        index = torch.arange(first + 1, first + count + 1, device=self.seeds.device)
        state = self.seeds[:, None] + (self.lengths[:, None] * _DRAWS + index) * _signed(_GAMMA)
        return _shift(_mixed(state), 11).double() * 2.0**-53


def _mixed(state: Tensor) -> Tensor:
    """``_mix`` of every number of an int64 tensor."""
    state = (state ^ _shift(state, 30)) * _signed(_FIRST)
    state = (state ^ _shift(state, 27)) * _signed(_SECOND)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in (torch's own shift of int64 repeats the sign)."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(state: int) -> int:
    state = (state ^ state >> 30) * _FIRST & _MASK
    state = (state ^ state >> 27) * _SECOND & _MASK
    return state ^ state >> 31
