"""The decode loop: one loop for plain decoding and for drafting, for one request and for many side by side.

Each round: the drafter proposes a tree behind the last emitted token of every request, the target reads all of them in
one pass, the rule accepts a path and adds one token of the target's own. What was rejected is taken back from the
target's cache. Requests accept different numbers of tokens, so the cache's rows are ragged; a request that ends makes
room for the next one.

Accounting is vLLM's: the prompt's pass emits the first token and is no round; every later target pass is one; drafted
tokens that were accepted count even where they run past the end of text or the token limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from specdraft.decoding import rules
from specdraft.decoding.cache import RewindableCache
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import Shape, as_shape
from specdraft.decoding.trace import Round, Trace
from specdraft.decoding.tree import DraftTree
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Features, Target


@dataclass
class Generation:
    """What one request produced. tokens: emitted ids, cut behind the first end of text and at the limit.

    drafted, accepted, nodes: per round, levels drafted (a chain's tokens), tokens accepted, and nodes verified.
    divergence: per round, of a lossy rule on chains, the total variation of its first token from the target.
    Seconds: of the prompt's pass, of all rounds after it (each with what the drafter does there), and the drafter's
    share of the rounds. Requests that are decoded side by side share their rounds, and each counts them whole.
    trace: the rounds themselves, if the decoder was asked for them.
    """

    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    trace: Trace | None = None


@dataclass
class _Request:
    """A request under way. number: its place among the prompts; state: the drafter's."""

    number: int
    limit: int
    generator: torch.Generator | None
    result: Generation
    state: Any = None
    read: int = 0  # tokens in which the end of text was looked for
    tree: DraftTree = field(default_factory=DraftTree.empty)


class Decoder:
    """Target + drafter + shape of the draft + sampling settings + rule; without a drafter it decodes plainly."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        shape: Shape | int = 5,
        sampling: Sampling | None = None,
        rule: rules.Rule = rules.rejection_sampling,
        trace: bool = False,
    ) -> None:
        """``shape`` is that of every draft, a number a chain of as many tokens; ``rule`` verifies above temperature 0.

        trace: whether every generation records its rounds, for someone to look at.

        Raises UserError for a drafter that is to draft fewer than 1 token.
        """
        self.target, self.drafter, self.rule = target, drafter, rule
        self.shape = as_shape(shape) if drafter is not None else None
        self.sampling = sampling or Sampling()
        self.trace = trace
        if drafter is not None:
            drafter.bind(target)

    @property
    def num_draft_tokens(self) -> int:
        """The most tokens that a round can accept; 0 without a drafter."""
        return 0 if self.shape is None else self.shape.depth

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """Decode one prompt until the end of text, ``max_new_tokens``, or the end of the target's context.

        Raises UserError for an empty prompt and for one that leaves no room in the context.
        """
        return next(self.stream([prompt_ids], max_new_tokens, [seed]))[1]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, seeds: Sequence[int] | None = None
    ) -> list[Generation]:
        """Decode prompts, up to ``batch_size`` side by side; the results are in the order of the prompts.

        Each comes out as if decoded alone: the same tokens at temperature 0 (up to the rounding of a batched pass), the
        same draws from its own seed above (default: its number). Raises UserError as ``generate`` does.
        """
        results = dict(self.stream(prompts, max_new_tokens, seeds, batch_size))
        return [results[number] for number in range(len(prompts))]

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int] | None = None,
        batch_size: int = 1,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield ``(number of the prompt, generation)`` as requests end, not necessarily in their order."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: expected at least 1 prompt to be decoded at a time")
        for prompt in prompts:
            self._check(prompt, max_new_tokens)
        seeds = range(len(prompts)) if seeds is None else seeds
        waiting = iter(range(len(prompts)))
        active: list[_Request] = []
        cache = self.target.new_cache(0)
        while True:
            while len(active) < batch_size and (number := next(waiting, None)) is not None:
                request, row = self._begin(number, prompts[number], max_new_tokens, seeds[number])
                if self._finished(request):
                    yield number, self._end(request)
                    continue
                if active:
                    cache.join(row)
                else:
                    cache = row
                active.append(request)
            if not active:
                return
            self._round(active, cache)
            for index in reversed(range(len(active))):
                if self._finished(active[index]):
                    request = active.pop(index)
                    if active:
                        cache.drop(index)
                    yield request.number, self._end(request)

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if not prompt_ids or self.target.max_length - len(prompt_ids) < 1 or max_new_tokens < 1:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens and {max_new_tokens} are to be generated: expected at least "
                f"1 of each, and room for an answer in the target's context of {self.target.max_length} tokens"
            )

    def _begin(
        self, number: int, prompt_ids: Sequence[int], max_new_tokens: int, seed: int
    ) -> tuple[_Request, RewindableCache]:
        """The prompt's pass: it emits the first token."""
        started = time.perf_counter()
        target, drafter, device = self.target, self.drafter, self.target.device
        limit = min(max_new_tokens, target.max_length - len(prompt_ids))
        generator = None if self.sampling.greedy else torch.Generator(device).manual_seed(seed)
        capacity = len(prompt_ids) + limit + (0 if self.shape is None else self.shape.num_nodes)
        cache = target.new_cache(capacity)
        layers = drafter.layers if drafter is not None else ()
        features = target.step(torch.tensor([prompt_ids], device=device), cache, layers)
        logits = target.logits(features.last[:, -1])
        if self.sampling.greedy:
            first = int(logits.argmax(-1))
        else:
            first = int(sample(self.sampling.probabilities(logits), generator))
        request = _Request(number, limit, generator, Generation([first]))
        if self.trace:
            request.result.trace = Trace(list(prompt_ids), first)
        if drafter is not None:
            request.state = drafter.start(prompt_ids[0], capacity)
            drafter.advance(request.state, torch.tensor([*prompt_ids[1:], first], device=device), features)
        request.result.prefill_seconds = time.perf_counter() - started
        return request, cache

    def _round(self, active: list[_Request], cache: RewindableCache) -> None:
        """Draft, verify, accept; every request emits at least one token."""
        started = time.perf_counter()
        target, drafter, held = self.target, self.drafter, cache.lengths  # the last emitted tokens are not yet held
        if drafter is not None:
            self._draft(drafter, active, held)
        drafting = time.perf_counter() - started if drafter is not None else 0.0

        features = self._verify(active, cache, held)
        logits = target.logits(features.last)  # [B, N + 1, V]
        if self.sampling.greedy:
            best = logits.argmax(-1)
        emitted: list[torch.Tensor] = []  # by every request, and the features of the positions before
        behind: list[Features] = []
        for row, (request, length) in enumerate(zip(active, held, strict=True)):
            tree, result = request.tree, request.result
            here = slice(0, len(tree) + 1)
            if self.sampling.greedy:
                verdict = rules.greedy(tree, best[row, here])
            else:
                p = self.sampling.probabilities(logits[row, here])
                verdict = self.rule(tree, p, request.generator)
                if isinstance(self.rule, rules.LossyRule) and tree.is_chain:
                    result.divergence.append(self.rule.divergence(tree, p))
            cache.keep(row, length + 1, verdict.path)
            new = [*tree.tokens[list(verdict.path)].tolist(), verdict.next_token]
            result.tokens += new
            if result.trace is not None:
                result.trace.rounds.append(Round.of(tree, verdict))
            if drafter is not None:
                result.drafted.append(tree.depth)
                result.accepted.append(len(verdict.path))
                result.nodes.append(len(tree))
                read = [0, *(node + 1 for node in verdict.path)]
                emitted.append(torch.tensor(new, device=target.device))
                behind.append(type(features)(*(part[row : row + 1, read] for part in features)))
        if drafter is not None:
            before = time.perf_counter()
            drafter.advance_batch([request.state for request in active], emitted, behind)
            drafting += time.perf_counter() - before
        spent = time.perf_counter() - started
        for request in active:
            request.result.decode_seconds += spent
            request.result.draft_seconds += drafting

    def _draft(self, drafter: Drafter, active: list[_Request], held: list[int]) -> None:
        """Give every request its draft, which may not run past the context: behind it the target has nothing to say."""
        assert self.shape is not None
        drafting: list[tuple[_Request, Shape]] = []
        for request, length in zip(active, held, strict=True):
            request.tree = DraftTree.empty(self.target.device)
            if (room := self.target.max_length - length - 1) >= 1:
                drafting.append((request, self.shape.cut(room)))
        if not drafting:
            return
        states, generators = [each.state for each, _ in drafting], [each.generator for each, _ in drafting]
        drafts = drafter.draft_batch(states, [shape for _, shape in drafting], self.sampling, generators)
        for (request, _), tree in zip(drafting, drafts, strict=True):
            request.tree = tree

    def _verify(self, active: list[_Request], cache: RewindableCache, held: list[int]) -> Features:
        """The target's features ``[B, N + 1, ...]`` of the last emitted token and of every node behind it."""
        target, device = self.target, self.target.device
        layers = self.drafter.layers if self.drafter is not None else ()
        if len(active) == 1 and active[0].tree.is_chain:  # the common case needs no mask
            last = torch.tensor([active[0].result.tokens[-1]], device=device)
            return target.step(torch.cat([last, active[0].tree.tokens])[None], cache, layers)
        size = 1 + max(len(request.tree) for request in active)
        tokens = torch.zeros((len(active), size), dtype=torch.int64, device=device)
        positions = torch.zeros((len(active), size), dtype=torch.int64)
        visible = torch.zeros((len(active), size, max(held) + size), dtype=torch.bool)
        for row, (request, length) in enumerate(zip(active, held, strict=True)):
            tree, count = request.tree, len(request.tree)
            tokens[row, 0] = request.result.tokens[-1]
            tokens[row, 1 : 1 + count] = tree.tokens
            positions[row] = length
            positions[row, 1 : 1 + count] += torch.tensor(tree.depths, dtype=torch.int64)
            visible[row, :, : length + 1] = True  # the text and the last token; also what padding looks at
            visible[row, 1 : 1 + count, length + 1 : length + 1 + count] = tree.ancestors()
        return target.step(tokens, cache, layers, positions.to(device), visible.to(device))

    def _finished(self, request: _Request) -> bool:
        tokens, new = request.result.tokens, request.result.tokens[request.read :]
        request.read = len(tokens)
        return len(tokens) >= request.limit or not self.target.eos_token_ids.isdisjoint(new)

    def _end(self, request: _Request) -> Generation:
        request.result.tokens = cut(request.result.tokens, request.limit, self.target.eos_token_ids)
        return request.result


def cut(tokens: Sequence[int], limit: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to ``limit`` and to the first end of text, which stays: how every decoder's output is counted."""
    kept = list(tokens[:limit])
    for index, token in enumerate(kept):
        if token in eos_token_ids:
            return kept[: index + 1]
    return kept
