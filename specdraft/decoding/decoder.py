"""The decode loop: one loop for plain decoding and for drafting, for one request and for many side by side.

Each round: the drafter proposes a tree after the last emitted token of every request, the target reads all of them in
one pass, the rule accepts a path and adds one token of the target's own. What was rejected is taken back from the
target's cache. Requests accept different numbers of tokens, so they differ in length; one that ends makes room for the
next one.

Accounting is vLLM's: the prompt's pass emits the first token and is no round; every later target pass is one; drafted
tokens that were accepted count even where they run past the end of text or the token limit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.cache import RewindableCache
from specdraft.decoding.interfaces import Drafter, Features, Target
from specdraft.decoding.padded import Reading, pad_pass
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import Shape, as_shape
from specdraft.decoding.threads import FEW_TOKENS, limited
from specdraft.decoding.trace import Round, Trace
from specdraft.decoding.tree import DraftTree
from specdraft.errors import UserError


@dataclass
class Generation:
    """What one request produced. tokens: emitted ids up to the first end of text, which stays, and up to the limit.

    drafted, accepted, nodes: per round, levels drafted (a chain's tokens), tokens accepted, and nodes verified.
    divergence: per round, of a lossy rule on chains, the total variation of its first token from the target.
    Seconds: of the prompt's pass, of all rounds after it (each with what the drafter does there), and the drafter's
    share of the rounds. Requests that are decoded side by side share their rounds, and each counts them whole.
    trace: the rounds themselves, if the decoder was asked for them."""

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
    prompt_length: int
    limit: int
    generator: torch.Generator | None
    result: Generation
    state: Any = None
    read: int = 0  # tokens in which the end of text was looked for
    tree: DraftTree = field(default_factory=DraftTree.empty)

    @property
    def held(self) -> int:
        """Tokens that the target has read: all but the last one."""
        return self.prompt_length + len(self.result.tokens) - 1

    def emit(self, verdict: rules.Verdict, drafted: bool) -> list[int]:
        """Note a verified draft, and count it if there is a drafter; returns the emitted tokens."""
        tree, result, path = self.tree, self.result, list(verdict.path)
        emitted = [*tree.tokens[path].tolist(), verdict.next_token]
        result.tokens += emitted
        if result.trace is not None:
            result.trace.rounds.append(Round.of(tree, verdict))
        if drafted:
            result.drafted.append(tree.depth)
            result.accepted.append(len(path))
            result.nodes.append(len(tree))
        return emitted


@contextmanager
def _timed(requests: Sequence[_Request], name: str) -> Iterator[None]:
    """Add the seconds inside to each request's result: what is done for all counts whole for each."""
    started = time.perf_counter()
    yield
    spent = time.perf_counter() - started
    for request in requests:
        setattr(request.result, name, getattr(request.result, name) + spent)


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
        """``shape`` is that of every draft, a number a chain of as many tokens; ``rule`` verifies above temperature 0;
        ``trace``: every generation records its rounds. Raises UserError for a draft of fewer than 1 token."""
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
        """Decode one prompt until the end of text, ``max_new_tokens``, or the end of the target's context. Raises
        UserError for an empty prompt and for one that leaves no room in the context."""
        return next(self.stream([prompt_ids], max_new_tokens, [seed]))[1]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, seeds: Sequence[int] | None = None
    ) -> list[Generation]:
        """Decode prompts, up to ``batch_size`` side by side, each as if decoded alone: the same tokens at temperature 0
        (up to the rounding of a batched pass), the same draws from its own seed above (default: its number). The
        results are in the order of the prompts. Raises UserError as ``generate`` does."""
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
            if not prompt or self.target.max_length - len(prompt) < 1 or max_new_tokens < 1:
                given = f"the prompt has {len(prompt)} tokens and {max_new_tokens} are to be generated"
                room = f"room for an answer in the target's context of {self.target.max_length} tokens"
                raise UserError(f"{given}: expected at least 1 of each, and {room}")
        seeds = range(len(prompts)) if seeds is None else seeds
        waiting = iter(range(len(prompts)))
        active: list[_Request] = []
        cache = self.target.new_cache(0)
        while True:
            begun = []
            while len(active) < batch_size and (number := next(waiting, None)) is not None:
                request, own = self._begin(number, prompts[number], max_new_tokens, seeds[number])
                if self._finished(request):
                    yield number, self._end(request)
                    continue
                begun.append(own)
                active.append(request)
            cache.join(begun)
            if not active:
                return
            self._round(active, cache)
            for index in reversed(range(len(active))):
                if self._finished(request := active[index]):
                    active[index] = active[-1]  # as in the cache; it is looked at already
                    active.pop()
                    cache.drop(index)
                    yield request.number, self._end(request)

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
        greedy = self.sampling.greedy
        first = int(logits.argmax(-1) if greedy else sample(self.sampling.probabilities(logits), generator))
        request = _Request(number, len(prompt_ids), limit, generator, Generation([first]))
        if self.trace:
            request.result.trace = Trace(list(prompt_ids), first)
        if drafter is not None:
            request.state = drafter.start(prompt_ids[0], capacity)
            drafter.advance(request.state, torch.tensor([*prompt_ids[1:], first], device=device), features)
        request.result.prefill_seconds = time.perf_counter() - started
        return request, cache

    def _round(self, active: list[_Request], cache: RewindableCache) -> None:
        """Draft, verify, accept, commit (2211.17192, algorithm 1); every request emits at least one token."""
        tokens = len(active) * (1 if self.shape is None else 1 + self.shape.num_nodes)
        threads = self.target.decoding_threads if tokens <= FEW_TOKENS else None
        with limited(threads), _timed(active, "decode_seconds"):
            self._draft(active)
            logits, features = self._verify(active, cache)
            verdicts = [self._accept(request, after) for request, after in zip(active, logits, strict=True)]
            self._commit(active, verdicts, features, cache)

    def _draft(self, active: list[_Request]) -> None:
        """Give every request its draft, which may not run past the context: the target has nothing to say there."""
        for request in active:
            request.tree = DraftTree.empty(self.target.device)
        drafting = [request for request in active if self.target.max_length - request.held > 1]
        if self.drafter is None or self.shape is None or not drafting:
            return
        shapes = [self.shape.truncate(self.target.max_length - request.held - 1) for request in drafting]
        states, generators = [each.state for each in drafting], [each.generator for each in drafting]
        with _timed(active, "draft_seconds"):
            drafts = self.drafter.draft_batch(states, shapes, self.sampling, generators)
        for request, tree in zip(drafting, drafts, strict=True):
            request.tree = tree

    def _verify(self, active: list[_Request], cache: RewindableCache) -> tuple[Tensor, Features]:
        """The target's logits ``[B, N + 1, V]`` and features after the last emitted token and after every node."""
        layers = () if self.drafter is None else self.drafter.layers
        last = [request.result.tokens[-1] for request in active]
        if len(active) == 1 and active[0].tree.is_chain:  # the common case needs no mask
            tokens = torch.cat([torch.tensor(last, device=self.target.device), active[0].tree.tokens])
            features = self.target.step(tokens[None], cache, layers)
        else:
            readings = [Reading.tree(token, each.tree, each.held) for token, each in zip(last, active, strict=True)]
            ids, positions, visible = pad_pass(readings)
            features = self.target.step(ids, cache, layers, positions, visible)
        return self.target.logits(features.last), features

    def _accept(self, request: _Request, logits: Tensor) -> rules.Verdict:
        """The path that the rule accepts, and the target's own token after it."""
        tree = request.tree
        logits = logits[: len(tree) + 1]
        if self.sampling.greedy:
            return rules.greedy(tree, logits.argmax(-1))
        p = self.sampling.probabilities(logits)
        if isinstance(self.rule, rules.LossyRule) and tree.is_chain:
            request.result.divergence.append(self.rule.divergence(tree, p))
        return self.rule(tree, p, request.generator)

    def _commit(
        self, active: list[_Request], verdicts: list[rules.Verdict], features: Features, cache: RewindableCache
    ) -> None:
        """Emit what was accepted, tell the drafter, and take the rest back from the target's cache."""
        emitted: list[Tensor] = []
        before: list[Features] = []  # of the positions before each emitted token
        for index, (request, verdict) in enumerate(zip(active, verdicts, strict=True)):
            cache.keep(index, request.held + 1, verdict.path)
            emitted.append(torch.tensor(request.emit(verdict, self.drafter is not None), device=self.target.device))
            before.append(features.at(index, [0, *(node + 1 for node in verdict.path)]))
        if self.drafter is not None:
            with _timed(active, "draft_seconds"):
                self.drafter.advance_batch([request.state for request in active], emitted, before)

    def _finished(self, request: _Request) -> bool:
        tokens, new = request.result.tokens, request.result.tokens[request.read :]
        request.read = len(tokens)
        return len(tokens) >= request.limit or not self.target.eos_token_ids.isdisjoint(new)

    def _end(self, request: _Request) -> Generation:
        request.result.tokens = truncate(request.result.tokens, request.limit, self.target.eos_token_ids)
        return request.result


def truncate(tokens: Sequence[int], limit: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to ``limit`` and to the first end of text, which stays: how every decoder's output is counted."""
    kept = list(tokens[:limit])
    end = next((place for place, token in enumerate(kept, start=1) if token in eos_token_ids), limit)
    return kept[:end]
