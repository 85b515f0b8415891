"""What decoding a prompt gives: tokens, and the counts and seconds of its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdraft.decoding.trace import Trace


@dataclass
class Generation:
    """What one request produced. tokens: emitted ids up to the first end of text, which stays, and up to the limit.

    drafted, accepted, nodes: per round, levels drafted (a chain's tokens), tokens accepted, and nodes verified.
    divergence: per round, of a lossy rule on chains, the total variation of its first token from the target.
    Seconds: of the prompt's pass, of all rounds after it (each with what the drafter does there), and the drafter's
    share of the rounds. Requests that are decoded side by side share their rounds, and each counts them whole.
    plain_rounds, plain_seconds: of rounds without a draft that were timed on the way, as ``Decoder.watch`` may; they
    emit nothing and are no part of the decoding time.
    trace: the rounds themselves, if the decoder was asked for them."""

    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_rounds: int = 0
    plain_seconds: float = 0.0
    trace: Trace | None = None


def truncate(tokens: Sequence[int], limit: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to ``limit`` and to the first end of text, which stays: how every decoder's output is counted."""
    kept = list(tokens[:limit])
    end = next((place for place, token in enumerate(kept, start=1) if token in eos_token_ids), limit)
    return kept[:end]
