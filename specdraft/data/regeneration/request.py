"""What the target is asked, and the interface of the engines that ask it."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specdraft.data.sources.base import Message
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import SERVED, sampling_at
from specdraft.errors import UserError
from specdraft.targets import Target

Ids = list[int]


@dataclass(frozen=True)
class RegenerationSettings:
    """How the target answers. Conversation i is at ``temperatures[i % len(temperatures)]``; 0 is greedy, "served" is
    as engines sample by default, by what the target is published with (``decoding/served.py``).
    ``batch_size`` requests are decoded side by side in this process, which changes speed and memory alone."""

    temperatures: tuple[float | str, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = [each for each in self.temperatures if not isinstance(each, str)]
        if not self.temperatures or min(numbers, default=0) < 0 or {*self.temperatures} - {*numbers, SERVED}:
            said = f"data.temperatures is {list(self.temperatures)}"
            raise UserError(f"{said}: expected a list of numbers from 0 upwards, or among them {SERVED}")
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"the {name} of regeneration is {getattr(self, name)}: expected a positive number")

    def sampling(self, target: Target, number: int) -> Sampling:
        """How conversation ``number`` is answered. Raises UserError as ``served``."""
        return sampling_at(target, self.temperatures[number % len(self.temperatures)])


class Request(NamedTuple):
    """One turn that the target is to write. ``prompt`` are the token ids that the chat template made of ``messages``
    and ``tools``; servers of words alone get those, and cannot be asked for what has no messages: a document's rest, a
    user's turn. ``seed`` is below 2**48."""

    prompt: Ids
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Sampling
    seed: int
    max_new_tokens: int


class Engine(Protocol):
    """A way to let the target answer. Nothing is loaded or asked before ``answers`` is called."""

    name: str

    def answers(
        self, target: Target, requests: Sequence[Request], settings: RegenerationSettings, known: Container[int] = ()
    ) -> Iterator[tuple[int, Ids]]:
        """Yield (number of the request, ids) in any order, for every request whose number is not ``known``.
        The ids reach up to and including an end mark; ids without one were cut by ``max_new_tokens``, and none at all
        are an answer that has no words. Known requests may be answered again, with the same ids. Raises UserError."""

    def close(self) -> None:
        """Free the engine's memory and connections. It may be asked again afterwards."""
