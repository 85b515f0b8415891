"""How an evaluation decodes: shape and drafting, rule, temperatures, lengths."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specdraft.decoding.block_verification import check_shape
from specdraft.decoding.compilation import wanted
from specdraft.decoding.grammar import Grammar
from specdraft.decoding.rules import Rule, rejection_sampling
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import SERVED, SHAPING, Published, served, shaped
from specdraft.decoding.shapes import AUTO, LONGEST, Shape, StaticTree, as_shape, draft_tokens
from specdraft.entry import build
from specdraft.errors import UserError, check_switch
from specdraft.evaluation.search import Search
from specdraft.export.engine import GREEDY, SAMPLED, Engine

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_AS_ENGINE = "engine"
_CHAIN = "specdraft.decoding.shapes.StaticTree.chain"


@dataclass(frozen=True)
class EvaluationSettings:
    """How to decode; every temperature is measured on every prompt. One of them may be "served": sampling as engines do
    unless they are told otherwise, by what the target is published with.

    ``shape`` is that of every draft: None is a chain of ``num_draft_tokens``, a function measures one with the drafter
    under test, a ``Search`` is for every trained drafter and temperature the draft that a sample of the prompts and the
    times of its steps promise most of. ``num_draft_tokens`` "auto" searches chains of at most 8 tokens; trees, and
    chains that end where the draft is unsure, are as deep as usual with it. ``rule`` verifies above temperature 0.
    ``drafting`` is how drafts are made there: "sampled" from the draft's distribution, "greedy" (its most likely
    tokens, verified as point masses), or "engine", as the engine does that the evaluation is for. So is
    ``truncate_drafts``: whether top-k and top-p hold for sampled drafts, too. ``batch_size``: requests that are decoded
    side by side."""

    num_draft_tokens: int | str = 5
    shape: "Shape | Search | Callable[[Drafter, Target], Shape] | None" = None
    rule: Rule = rejection_sampling
    drafting: str = _AS_ENGINE
    temperatures: tuple[float | str, ...] = (0.0, 1.0)
    top_k: int | None = None  # None, here and below: off, and at temperature "served" what the target's settings say
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    truncate_drafts: bool | str = _AS_ENGINE
    grammar: str | None = None  # what answers follow: "json", or the path of a file (decoding/grammar.py)
    mask_drafts: bool = True  # whether drafts follow it, too; an engine's do not
    max_new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0
    compile: bool | str = "auto"  # the passes; auto: on CUDA
    samples: int = 3  # prompts whose answers are recorded round by round, for the report
    served: Sampling | None = None  # what the temperature "served" stands for, once the target is known

    @classmethod
    def from_config(cls, decoding: Mapping[str, Any], seed: int = 0) -> "EvaluationSettings":
        """From the ``decoding`` group of a configuration, where ``temperature`` is a number or a list of numbers.
        Raises UserError for values that cannot be decoded with."""
        options = dict(decoding)
        temperature = options.pop("temperature")
        later = {name: options.pop(name) for name in ("shape", "rule") if name in options}
        several = isinstance(temperature, Sequence) and not isinstance(temperature, str)
        temperatures = temperature if several else [temperature]
        settings = cls(temperatures=tuple(dict.fromkeys(temperatures)), seed=seed, **options)
        if settings.num_draft_tokens == AUTO:
            node = later.pop("shape", {"_target_": _CHAIN})
            if node["_target_"] != _CHAIN or node.get("stop") is not None:
                usual = draft_tokens(AUTO)
                settings = replace(settings, num_draft_tokens=usual)
                later["shape"] = {key: usual if value == AUTO else value for key, value in node.items()}
        # Shapes read the number of draft tokens, which is checked by now.
        return replace(settings, **{name: build(node) for name, node in later.items()})

    def __post_init__(self) -> None:
        for name, least, why in (
            ("num_draft_tokens", 1, "drafted token a round"),
            ("max_new_tokens", 2, "new tokens, as the first of an answer is never drafted"),
            ("batch_size", 1, "request decoded at a time"),
        ):
            value = getattr(self, name)
            if name == "num_draft_tokens" and value == AUTO:
                continue
            if not isinstance(value, int) or value < least:
                raise UserError(f"decoding.{name} is {value}: expected at least {least} {why}")
        if self.num_draft_tokens != AUTO and int(self.num_draft_tokens) > LONGEST:
            said = f"decoding.num_draft_tokens is {self.num_draft_tokens}"
            raise UserError(f"{said}: expected at most {LONGEST} drafted tokens a round")
        if not isinstance(self.seed, int):
            raise UserError(f"seed is {self.seed!r}: expected a whole number")
        if self.drafting not in (_AS_ENGINE, SAMPLED, GREEDY):
            raise UserError(f"decoding.drafting is {self.drafting!r}: expected {_AS_ENGINE}, {SAMPLED} or {GREEDY}")
        if not self.temperatures:
            raise UserError("decoding.temperature is an empty list: expected a number or a list of numbers")
        for temperature in self.temperatures:
            if temperature == SERVED:
                shaped(Sampling(), self._given())
            elif not isinstance(temperature, int | float):
                said = f"decoding.temperature is {temperature!r}: expected a number, a list of numbers, or among them"
                raise UserError(f"{said} {SERVED}, as the target's generation_config.json says")
            else:
                self.sampling(temperature)
        check_switch("decoding.mask_drafts", self.mask_drafts)
        if self.truncate_drafts != _AS_ENGINE and not isinstance(self.truncate_drafts, bool):
            said = f"decoding.truncate_drafts is {self.truncate_drafts}"
            raise UserError(f"{said}: expected true, false or {_AS_ENGINE}")
        wanted(self.compile, torch.device("cpu"))
        if self.shape is not None:
            check_shape(self.rule, self.shape)

    def draft_shape(self, drafter: "Drafter", target: "Target") -> Shape:
        """The shape of every draft, measured if it has to be."""
        if self.search is not None:
            return as_shape(self.search.longest)
        if self.shape is None or isinstance(self.shape, Shape):
            return self.shape or as_shape(draft_tokens(self.num_draft_tokens))
        assert not isinstance(self.shape, Search)
        return self.shape(drafter, target)

    @property
    def search(self) -> Search | None:
        """What every drafter's shape is chosen among; None: it is known."""
        if isinstance(self.shape, Search):
            return self.shape
        return Search() if self.num_draft_tokens == AUTO else None

    def draftings(self, engine: Engine | None) -> tuple[str, ...]:
        """How to draft above temperature 0: what the evaluation is about, then what an engine has beside it."""
        if self.drafting != _AS_ENGINE:
            return (self.drafting,)
        if engine is None:
            return (SAMPLED,)
        return (GREEDY, SAMPLED) if engine.drafting == GREEDY else (SAMPLED, GREEDY)

    def drawn_as(self, engine: Engine | None) -> "EvaluationSettings":
        """With sampled drafts truncated as the engine does; without one they are."""
        if self.truncate_drafts != _AS_ENGINE:
            return self
        return replace(self, truncate_drafts=engine is None or engine.truncates_drafts)

    def known(self, target: "Published") -> "EvaluationSettings":
        """With the temperature that "served" stands for. Raises UserError where it is one of the others, as results are
        told apart by it, and as ``served``."""
        if SERVED not in self.temperatures:
            return self
        own = served(target)
        if own.temperature in self.temperatures:
            said = f"decoding.temperature is {list(self.temperatures)}, and the target is served at {own.temperature:g}"
            raise UserError(f"{said}: expected one of the two, as results are told apart by their temperature")
        temperatures = tuple(own.temperature if each == SERVED else each for each in self.temperatures)
        return replace(self, temperatures=temperatures, served=own)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The temperatures of settings whose target is ``known``."""
        return tuple(each for each in self.temperatures if not isinstance(each, str))

    def sampling(self, temperature: float) -> Sampling:
        """The sampling settings at one of the temperatures."""
        grammar = None if self.grammar is None else Grammar.of(self.grammar, self.mask_drafts)
        sampling = replace(self._shaped(temperature), grammar=grammar)
        return sampling.drafting(truncates=self.truncate_drafts is not False)

    def as_served(self, temperature: float) -> bool:
        """Whether that is how the target is served, with nothing else in place of what it is published with."""
        return self._shaped(temperature) == self.served

    def unmeasured(self, target: "Published") -> str | None:
        """How engines sample this target by default, where it is published so and none of the temperatures is that."""
        if not {"temperature", *SHAPING} & target.generation_settings.keys():
            return None
        with suppress(UserError):  # which "served" would raise
            default = served(target)
            return None if default in map(self._shaped, self.numbers) else str(default)
        return None

    def _shaped(self, temperature: float) -> Sampling:
        own = self.served if self.served is not None and temperature == self.served.temperature else None
        return shaped(own or Sampling(temperature), self._given())

    def _given(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in SHAPING}


def drafted(shape: Shape, drafting: str) -> Shape:
    """The shape, with its tokens sampled or chosen; a dynamic tree always chooses them."""
    return replace(shape, sampled=drafting == SAMPLED) if isinstance(shape, StaticTree) else shape
