"""What the decode loop asks of a target and of a drafter; the classes themselves lie above this package.

B = requests, n = the most tokens that one of them emitted."""

# ruff: noqa: D102  (methods are described where they are defined)

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass, Riders, Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees

if TYPE_CHECKING:
    from specdraft.decoding.grammar import Followed


class Features(Protocol):
    """Hidden states of a pass; see ``targets/language_model.py``."""

    @property
    def last(self) -> Tensor: ...
    def take(self, positions: Tensor) -> Any: ...


class Target(Protocol):
    """See ``targets/language_model.py``."""

    max_length: int
    vocab_size: int
    tokenizer: Any

    @property
    def device(self) -> torch.device: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def decoding_threads(self) -> int | None: ...
    def new_cache(self, rows: int, capacity: int) -> StaticCache: ...
    def step(self, reading: Pass, cache: StaticCache, layers: Sequence[int] = (), first: int = 0) -> Features: ...
    def logits(self, last: Tensor) -> Tensor: ...


class Drafting(ABC):
    """What a drafter keeps of the requests that are decoded side by side, and how it drafts for them.
    A request is ``begin``-ned in a row of its own; after every pass of the target ``advance`` hands over what was
    emitted; ``draft`` proposes what comes next; a request that ends is dropped."""

    top_tokens: int = 0
    """How many of the target's most likely tokens ``observe`` is to be shown; 0: it is not called."""

    def observe(self, tokens: Tensor, best: Tensor) -> None:  # noqa: B027 (most drafters do not ask for it)
        """The target has read ``tokens [B, n]``, all of a prompt, or the last emitted tokens and their drafts, rejected
        ones too, and ``best [B, n, top_tokens]`` are what it would say after each, the most likely first."""

    shares_cache: bool = False
    """Whether it drafts with the target's cache, which ``borrow`` hands over."""

    def borrow(self, cache: StaticCache) -> None:  # noqa: B027 (most drafters have a cache of their own, or none)
        """The target's cache, whose rows are those of the requests: the target has read all of a text but its last
        token. A draft may write from there on, where the target's next pass writes again."""

    def constrain(self, grammar: "Followed") -> None:  # noqa: B027 (what looks drafts up has no distribution to mask)
        """Answers follow a grammar, and so may drafts: where the requests stand in it. A draft that does not is exact
        all the same, and rejected where it breaks the grammar."""

    def num_read(self, shape: Shape) -> int:
        """The most tokens that a pass of the target reads for a draft of this ``shape``, whatever rides along too."""
        return shape.num_nodes

    def ride(self, texts: Texts) -> Riders | None:
        """What rides along in the pass that verifies the drafts of ``texts``, asked in every round after ``draft``."""
        return None

    def hear(self, logits: Tensor) -> None:  # noqa: B027 (only those that have something ride along are told)
        """The target's logits ``[B, asked, V]`` after what rode along in the pass, before ``advance``."""

    @abstractmethod
    def begin(self, row: int, first_token: int) -> None:
        """A request whose prompt begins with ``first_token``."""

    @abstractmethod
    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Any) -> None:
        """After ``texts`` were emitted the first ``counts [B]`` of ``tokens [B, n]``; ``features [B, n, ...]`` at j are
        of the position *before* ``tokens[:, j]``. Of a new request they are the prompt from its second token on, and
        the first token that the target emitted."""

    @abstractmethod
    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """What may follow ``texts``, in this ``shape`` or a part of it; nothing that is kept changes by it.
        ``sampling`` shapes the q of sampled drafts, and ``chance`` draws them (None: nothing is drawn)."""

    @abstractmethod
    def drop(self, row: int, last: int, length: int) -> None:
        """Forget a request; the ``last`` one, a text of ``length`` tokens, takes its place."""


class Drafter(Protocol):
    """See ``drafters/base.py``."""

    branches: bool
    rates_hold: ClassVar[bool]

    @property
    def draws(self) -> bool: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    def bind(self, target: Any) -> None: ...
    def num_places(self, shape: Shape) -> int: ...
    def drafting(self, rows: int, capacity: int) -> Drafting: ...
