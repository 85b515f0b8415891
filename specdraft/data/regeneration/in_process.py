"""The target in this process answers: our own decode loop, many requests side by side, with a drafter if there is one.

Drafting is lossless: greedy answers are the same with any drafter and with none, sampled ones of the same distribution.
"""

from collections.abc import Container, Iterator, Sequence

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.decoding.compilation import compiling, wanted
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.served import SHAPING
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, find, load_drafter
from specdraft.errors import UserError
from specdraft.onednn import pack
from specdraft.targets import Target


class InProcess:
    """Each request comes out as if decoded alone, with draws from its own seed, up to the rounding of a batched pass.
    So that not even rounding depends on what was answered before an interruption, batches are fixed beforehand, and one
    that is known in part is decoded again as a whole; nor does anything depend on what is measured."""

    def __init__(self, drafter: str | None = None, num_draft_tokens: int = 5, compile: bool | str = "auto") -> None:
        """``drafter``: a checkpoint or run directory. ``compile``: see ``decoding/compilation.py``. Raises UserError if
        there is no drafter at that place."""
        self.checkpoint = find(drafter) if drafter is not None else None
        self.num_draft_tokens, self.compile = num_draft_tokens, compile
        self.name = "in_process" if drafter is None else "in_process, drafting"
        self._drafter: Drafter | None = None

    def answers(
        self, target: Target, requests: Sequence[Request], settings: RegenerationSettings, known: Container[int] = ()
    ) -> Iterator[tuple[int, Ids]]:
        """As ``Engine`` says. Raises UserError for a drafter of another target, and a target sharded over the ranks."""
        if target.engine is not None:  # the other ranks wait for the answers, and this one would wait for them
            raise UserError(
                "the answers are not in the cache, and a target with placement=zero3 does not regenerate them: "
                "expected data.cache_dir of one that did, another generator=, data.store=DIR, or data.regenerate=false"
            )
        for numbers in plan_batches(requests, settings.batch_size):
            if all(number in known for number in numbers):
                continue
            if self._drafter is None and self.checkpoint is not None:
                drafter, config = load_drafter(self.checkpoint)
                check_target(config, target)
                self._drafter = drafter.to(target.device, target.dtype)
                pack(self._drafter)
            sampling = requests[numbers[0]].sampling
            decoder = Decoder(target, self._drafter, self.num_draft_tokens, sampling, repeatable=True)
            prompts = [requests[number].prompt for number in numbers]
            seeds = [requests[number].seed for number in numbers]
            with compiling(wanted(self.compile, target.device)):
                results = decoder.generate_batch(prompts, requests[numbers[0]].max_new_tokens, len(prompts), seeds)
            yield from ((number, result.tokens) for number, result in zip(numbers, results, strict=True))

    def close(self) -> None:
        """Forget the drafter."""
        self._drafter = None


def plan_batches(requests: Sequence[Request], batch_size: int) -> list[list[int]]:
    """Numbers of requests that are decoded side by side: sampled alike, up to one length, long prompts first.
    Similar lengths leave little padding to compute; the longest come first so that a lack of memory shows at once."""
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt), i))
    batches = []
    for kind in sorted({_kind(request) for request in requests}):
        members = [number for number in order if _kind(requests[number]) == kind]
        batches += [members[start : start + batch_size] for start in range(0, len(members), batch_size)]
    return sorted(batches, key=lambda batch: -len(requests[batch[0]].prompt))


def _kind(request: Request) -> tuple[float | int, ...]:
    sampling = request.sampling
    return sampling.temperature, request.max_new_tokens, *(getattr(sampling, name) for name in SHAPING)
