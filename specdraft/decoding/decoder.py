"""The decode loop: one loop for plain decoding and for drafting, for one request and for many side by side.

B = requests under way, N = nodes of a draft, D = its levels, V = vocabulary.

Each round: the drafter proposes a tree after the last emitted token of every request, the target reads all of them in
one pass, the rule accepts a path and adds one token of the target's own. What was rejected is overwritten in the
target's cache. Requests accept different numbers of tokens, so they differ in length; one that ends makes room for the
next one. All of a round is launched without waiting for the device; at its end the host reads what was emitted, once.

Accounting is vLLM's: the prompt's pass emits the first token and is no round; every later target pass is one; drafted
tokens that were accepted count even where they run past the end of text or the token limit."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.clock import Clock
from specdraft.decoding.interfaces import Drafter, Features, Target
from specdraft.decoding.passes import Pass, Texts
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import Shape, as_shape
from specdraft.decoding.threads import FEW_TOKENS, limited
from specdraft.decoding.trace import Round, Trace
from specdraft.decoding.tree import DraftTrees, empty
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
        if not prompts:
            return
        seeds = range(len(prompts)) if seeds is None else seeds
        lengths = [min(len(prompt) + max_new_tokens, self.target.max_length) for prompt in prompts]
        batch = _Batch(self, min(batch_size, len(prompts)), max(lengths))
        waiting = iter(range(len(prompts)))
        while True:
            while len(batch.requests) < batch_size and (number := next(waiting, None)) is not None:
                request = batch.begin(number, prompts[number], lengths[number] - len(prompts[number]), seeds[number])
                if self._finished(request):
                    batch.drop(len(batch.requests) - 1)
                    yield number, self._end(request)
            if not batch.requests:
                return
            tokens = len(batch.requests) * (1 if self.shape is None else 1 + self.shape.num_nodes)
            with limited(self.target.decoding_threads if tokens <= FEW_TOKENS else None):
                batch.round()
            for index in reversed(range(len(batch.requests))):
                if self._finished(request := batch.requests[index]):
                    batch.drop(index)
                    yield request.number, self._end(request)

    def _finished(self, request: "_Request") -> bool:
        tokens, new = request.result.tokens, request.result.tokens[request.read :]
        request.read = len(tokens)
        return len(tokens) >= request.limit or not self.target.eos_token_ids.isdisjoint(new)

    def _end(self, request: "_Request") -> Generation:
        result = request.result
        result.tokens = truncate(result.tokens, request.limit, self.target.eos_token_ids)
        if request.divergence:
            result.divergence = torch.stack(request.divergence).tolist()
        return result


@dataclass
class _Request:
    """A request under way. number: its place among the prompts. divergence: of its rounds, not yet read."""

    number: int
    prompt_length: int
    limit: int
    result: Generation
    read: int = 0  # tokens in which the end of text was looked for
    divergence: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of its text. The target has read all but the last one."""
        return self.prompt_length + len(self.result.tokens)


class _Batch:
    """Requests that are decoded side by side, each in a row of what is on the device: caches, the last emitted token,
    the length of the text, the seed."""

    def __init__(self, decoder: Decoder, rows: int, longest: int) -> None:
        """Room for ``rows`` texts of up to ``longest`` tokens."""
        self.decoder, self.requests = decoder, list[_Request]()
        self.target, self.sampling, self.shape = decoder.target, decoder.sampling, decoder.shape
        self.layers = () if decoder.drafter is None else decoder.drafter.layers
        device = self.target.device
        self.clock = Clock(device)
        capacity = longest + 1 + (0 if self.shape is None else self.shape.num_nodes)
        self.cache = self.target.new_cache(rows, capacity)
        self.drafting = None if decoder.drafter is None else decoder.drafter.drafting(rows, capacity)
        self.last, self.lengths, self.seeds = torch.zeros((3, rows), dtype=torch.int64, device=device)

    def begin(self, number: int, prompt: Sequence[int], limit: int, seed: int) -> _Request:
        """The prompt's pass: it emits the first token."""
        started = time.perf_counter()
        target, device, row = self.target, self.target.device, len(self.requests)
        reading = Pass.prompt(prompt, device)
        features = target.step(reading, self.cache, self.layers, row)
        logits = target.logits(features.last[:, -1])
        self.lengths[row], self.seeds[row] = len(prompt), Chance.mixed(seed)
        if self.sampling.greedy:
            first = logits.argmax(-1)
        else:
            uniform = self._chance(row, row + 1).uniform(0, 1)[:, 0]
            first = sample(self.sampling.probabilities(logits), uniform)
        self.lengths[row], self.last[row] = len(prompt) + 1, first[0]
        if self.drafting is not None:
            self.drafting.begin(row, prompt[0])
            counts = torch.full((1,), len(prompt), device=device)
            read = Texts(torch.ones(1, dtype=torch.int64, device=device), 1, row)
            self.drafting.advance(read, torch.cat([reading.ids[:, 1:], first[:, None]], dim=1), counts, features)
        request = _Request(number, len(prompt), limit, Generation(first.tolist()))
        if self.decoder.trace:
            request.result.trace = Trace(list(prompt), request.result.tokens[0])
        request.result.prefill_seconds = time.perf_counter() - started
        self.requests.append(request)
        return request

    def round(self) -> None:
        """Draft, verify, accept, commit (2211.17192, algorithm 1); every request emits at least one token."""
        started = time.perf_counter()
        lengths = [request.length for request in self.requests]
        texts = Texts(self.lengths[: len(lengths)], max(lengths))
        marks = [self.clock.mark()]
        trees = self._draft(texts, min(lengths))
        marks.append(self.clock.mark())
        logits, features = self._verify(texts, trees)
        verdict = self._accept(trees, logits)
        marks.append(self.clock.mark())
        emitted = self._commit(texts, trees, verdict, features)
        marks.append(self.clock.mark())
        self._note(trees, verdict, emitted)
        spent = time.perf_counter() - started
        drafting = self.clock.seconds(marks[0], marks[1]) + self.clock.seconds(marks[2], marks[3])
        for request in self.requests:  # what is done for all counts whole for each
            request.result.decode_seconds += spent
            request.result.draft_seconds += 0.0 if self.drafting is None else drafting

    def drop(self, index: int) -> None:
        """Forget a request; the last one takes its row."""
        last = len(self.requests) - 1
        length = self.requests[last].length
        self.requests[index] = self.requests[last]
        self.requests.pop()
        if index == last:
            return
        self.cache.drop(index, last, length)
        if self.drafting is not None:
            self.drafting.drop(index, last, length)
        for rows in (self.last, self.lengths, self.seeds):
            rows[index] = rows[last]

    def _chance(self, first: int, end: int) -> Chance:
        return Chance(self.seeds[first:end], self.lengths[first:end])

    def _draft(self, texts: Texts, shortest: int) -> DraftTrees:
        """A draft for every request, which may not run past the context: the target has nothing to say there."""
        room = self.target.max_length - shortest
        if self.drafting is None or self.shape is None or room < 1:
            return empty(len(texts.lengths), self.target.device)
        shape = self.shape.truncate(room)
        trees = self.drafting.draft(texts, shape, self.sampling, self._chance(0, len(texts.lengths)))
        if texts.longest + shape.depth > self.target.max_length:
            trees = trees.truncate(self.target.max_length - texts.lengths)
        return trees

    def _verify(self, texts: Texts, trees: DraftTrees) -> tuple[Tensor, Features]:
        """The target's logits ``[B, N + 1, V]`` and features after the last emitted token and after every node."""
        last, limit = self.last[: len(texts.lengths)], self.target.max_length
        reading = Pass.trees(last, trees, texts.lengths - 1, texts.longest - 1, limit)
        features = self.target.step(reading, self.cache, self.layers)
        return self.target.logits(features.last), features

    def _accept(self, trees: DraftTrees, logits: Tensor) -> rules.Verdict:
        """The path that the rule accepts of every draft, and the target's own token after it."""
        if self.sampling.greedy:
            return rules.greedy(trees, logits.argmax(-1))
        p, rule = self.sampling.probabilities(logits), self.decoder.rule
        if isinstance(rule, rules.LossyRule) and trees.is_chain:
            for request, divergence in zip(self.requests, rule.divergence(trees, p), strict=True):
                request.divergence.append(divergence)
        return rule(trees, p, self._chance(0, len(p)).uniform(0, p.shape[1]))

    def _commit(self, texts: Texts, trees: DraftTrees, verdict: rules.Verdict, features: Features) -> Tensor:
        """Put the accepted nodes where the text goes on, tell the drafter. The emitted tokens ``[B, D + 1]``, of which
        ``verdict.accepted + 1`` are."""
        path, count, following = verdict
        emitted = torch.nn.functional.pad(trees.tokens.gather(1, path), (0, 1))
        emitted = emitted.scatter(1, count[:, None], following[:, None])
        if not trees.is_chain and path.shape[1]:  # a chain's nodes already lie where they belong
            index, start = torch.arange(path.shape[1], device=path.device), texts.lengths[:, None]
            self.cache.move(start + torch.where(index < count[:, None], path, index), start + index)
        if self.drafting is not None:
            before = torch.nn.functional.pad(path + 1, (1, 0))  # the positions before each emitted token
            self.drafting.advance(texts, emitted, count + 1, features.take(before))
        texts.lengths.add_(count + 1)
        self.last[: len(following)] = following
        return emitted

    def _note(self, trees: DraftTrees, verdict: rules.Verdict, emitted: Tensor) -> None:
        """Read what was emitted, and count it if there is a drafter: the one time that a round waits for the device."""
        drafts = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))  # [B, N]
        levels = (trees.depths * drafts).amax(-1) if trees.num_nodes else verdict.accepted
        columns = torch.stack([verdict.accepted, levels, drafts.sum(-1)], dim=1)
        for index, (accepted, depth, nodes, *tokens) in enumerate(torch.cat([columns, emitted], dim=1).tolist()):
            request = self.requests[index]
            result = request.result
            result.tokens += tokens[: accepted + 1]
            if result.trace is not None:
                path = verdict.path[index, :accepted].tolist()
                result.trace.rounds.append(Round.of(trees, index, path, tokens[accepted]))
            if self.drafting is not None:
                result.drafted.append(depth)
                result.accepted.append(accepted)
                result.nodes.append(nodes)


def truncate(tokens: Sequence[int], limit: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to ``limit`` and to the first end of text, which stays: how every decoder's output is counted."""
    kept = list(tokens[:limit])
    end = next((place for place, token in enumerate(kept, start=1) if token in eos_token_ids), limit)
    return kept[:end]
