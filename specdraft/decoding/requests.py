"""Requests under way, decoded side by side: what is on the device for each of them, and a round of all.

B = requests, N = nodes of a draft, D = its levels, V = vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.clock import Clock, now
from specdraft.decoding.generation import Generation
from specdraft.decoding.interfaces import Drafter, Drafting, Features, Target
from specdraft.decoding.pace import Pace
from specdraft.decoding.pacing import Rounds
from specdraft.decoding.passes import Pass, Riders, Texts
from specdraft.decoding.processors import Processors
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import Shape
from specdraft.decoding.trace import Round, Trace
from specdraft.decoding.tree import DraftTrees, empty

_SHOWN = 512  # positions of a prompt whose logits are in memory together


@dataclass
class Request:
    """A request under way. number: its place among the prompts. divergence: of its rounds, not yet read."""

    number: int
    prompt_length: int
    limit: int
    result: Generation
    read: int = 0  # tokens in which the end of text was looked for
    divergence: list[Tensor] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)  # what a rule of how much to draft knows of it

    @property
    def length(self) -> int:
        """Tokens of its text. The target has read all but the last one."""
        return self.prompt_length + len(self.result.tokens)


@dataclass(frozen=True)
class Read:
    """A prompt that was just read: where its keys and values are, the hidden states of its pass, and the logits after
    it ``[1, V]``."""

    ids: list[int]
    row: int
    features: Features
    logits: Tensor


class Method(Protocol):
    """What requests are decoded with: a ``Decoder``."""

    target: Target
    drafter: Drafter | None
    shape: Shape | None
    num_places: int
    sampling: Sampling
    rule: rules.Rule
    trace: bool


class Requests:
    """Requests that are decoded side by side, each in a row of what is on the device: caches, the last emitted token,
    the length of the text, the seed."""

    def __init__(self, method: Method, rows: int, longest: int) -> None:
        """Room for ``rows`` texts of up to ``longest`` tokens."""
        self.method, self.under_way = method, list[Request]()
        self.target, self.sampling, drafter = method.target, method.sampling, method.drafter
        self.layers = () if drafter is None else drafter.layers
        device = self.target.device
        self.clock = Clock(device)
        self.pace = Pace.of(method.shape, drafter)
        self.drafting: Drafting | None = None
        self.num_read = 0  # tokens of each that a round's pass reads at most, beside the last emitted one
        capacity = longest + 1 + method.num_places
        if drafter is not None and method.shape is not None:
            self.drafting = drafter.drafting(rows, capacity)
            self.num_read = self.drafting.num_read(method.shape)
        self.cache = self.target.new_cache(rows, capacity)
        if self.drafting is not None:
            self.drafting.borrow(self.cache)
        self.processors = Processors(self.sampling, self.target, rows)
        if self.drafting is not None and self.processors.masks_drafts is not None:
            self.drafting.constrain(self.processors.masks_drafts)
        self._read: Read | None = None
        self.last, self.lengths, self.seeds = torch.zeros((3, rows), dtype=torch.int64, device=device)

    def begin(self, number: int, prompt: Sequence[int], limit: int, seed: int) -> Request:
        """The prompt's pass: it emits the first token."""
        started = now()
        target, device, row = self.target, self.target.device, len(self.under_way)
        reading = Pass.prompt(prompt, device)
        read = self._read_prompt(reading, list(prompt), row)
        features, logits = read.features, read.logits
        self.lengths[row], self.seeds[row] = len(prompt), Chance.mixed(seed)
        logits = self.processors.begin(row, reading.ids[0], logits)
        if self.sampling.greedy:
            first = logits.argmax(-1)
        else:
            uniform = self._chance(row, row + 1).uniform(0, 1)[:, 0]
            first = sample(self.sampling.probabilities(logits), uniform)
        self.lengths[row], self.last[row] = len(prompt) + 1, first[0]
        if self.drafting is not None:
            self.drafting.begin(row, prompt[0])
            for start in range(0, len(prompt), _SHOWN) if self.drafting.top_tokens else ():
                part = features.last[:, start : start + _SHOWN]
                self._show(reading.ids[:, start : start + _SHOWN], target.logits(part))
            counts = torch.full((1,), len(prompt), device=device)
            texts = Texts(torch.ones(1, dtype=torch.int64, device=device), 1, row)
            self.drafting.advance(texts, torch.cat([reading.ids[:, 1:], first[:, None]], dim=1), counts, features)
        self.processors.advance(first[:, None], torch.ones_like(first), row)
        request = Request(number, len(prompt), limit, Generation(first.tolist()))
        self.processors.read(row, request.result.tokens)
        if self.method.trace:
            request.result.trace = Trace(list(prompt), request.result.tokens[0])
        request.result.prefill_seconds = now() - started
        self.under_way.append(request)
        return request

    def _read_prompt(self, reading: Pass, prompt: list[int], row: int) -> Read:
        """Its pass, which several answers to one question share where they begin one after the other."""
        if self._read is not None and self._read.ids == prompt:
            self.cache.copy(self._read.row, row, len(prompt))
            return self._read
        self._read = None  # before the pass: not the states of two prompts at once
        features = self.target.step(reading, self.cache, self.layers, row)
        self._read = Read(prompt, row, features, self.target.logits(features.last[:, -1]))
        return self._read

    def round(self) -> None:
        """Draft, verify, accept, commit (2211.17192, algorithm 1); every request emits at least one token."""
        started = now()
        self._read = None
        lengths = [request.length for request in self.under_way]
        texts = Texts(self.lengths[: len(lengths)], max(lengths))
        marks = [self.clock.mark()]
        trees = self._draft(texts, min(lengths))
        riders = None if self.drafting is None else self.drafting.ride(texts)
        marks.append(self.clock.mark())
        logits, features = self._verify(texts, trees, self.layers, riders)
        processed, counted = self.processors.apply(logits, trees)
        verdict = self._accept(trees, processed)
        marks.append(self.clock.mark())
        if self.drafting is not None and self.drafting.top_tokens:
            alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))
            self._show(torch.cat([self.last[: len(lengths), None], trees.tokens], dim=1), logits, alive)
        emitted = self._commit(texts, trees, verdict, features)
        marks.append(self.clock.mark())
        self._note(counted, verdict, emitted)
        spent = now() - started
        drafting = self.clock.seconds(marks[0], marks[1]) + self.clock.seconds(marks[2], marks[3])
        for request in self.under_way:  # what is done for all counts whole for each
            request.result.decode_seconds += spent
            request.result.draft_seconds += 0.0 if self.drafting is None else drafting

    def time_plain_round(self) -> None:
        """Time a round without a draft where the requests stand: the target reads their last tokens and chooses the
        next ones, which nobody keeps. The next round writes the same into the cache again."""
        started = now()
        lengths = [request.length for request in self.under_way]
        texts = Texts(self.lengths[: len(lengths)], max(lengths))
        trees = empty(len(lengths), self.target.device)
        logits = self.processors.apply(self._verify(texts, trees, ())[0], trees)[0]
        if self.sampling.greedy:
            verdict = rules.greedy(trees, logits.argmax(-1))
        else:
            p = self.sampling.probabilities(logits)
            verdict = rules.rejection_sampling(trees, p, self._chance(0, len(p)).uniform(0, p.shape[1]))
        verdict.next_token.tolist()  # waits for the device
        spent = now() - started
        for request in self.under_way:
            request.result.plain_rounds += 1
            request.result.plain_seconds += spent

    def drop(self, index: int) -> None:
        """Forget a request; the last one takes its row."""
        last = len(self.under_way) - 1
        length = self.under_way[last].length
        self.under_way[index] = self.under_way[last]
        self.under_way.pop()
        if index == last:
            return
        self.cache.copy(last, index, length)
        self.processors.drop(index, last)
        if self.drafting is not None:
            self.drafting.drop(index, last, length)
        for rows in (self.last, self.lengths, self.seeds):
            rows[index] = rows[last]

    def _show(self, tokens: Tensor, logits: Tensor, alive: Tensor | None = None) -> None:
        """Tell the drafter what the target would say after each of ``tokens [B, n]``; logits: ``[B, n, V]``. ``alive``:
        ``[B, n - 1]``, which of those after the first are drafts at all; the others repeat what the first one told."""
        assert self.drafting is not None
        best = logits.topk(self.drafting.top_tokens).indices  # [B, n, k]
        if alive is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            place = torch.where(torch.nn.functional.pad(alive, (1, 0), value=True), place, 0)
            tokens, best = tokens.gather(1, place), best.gather(1, place[..., None].expand_as(best))
        self.drafting.observe(tokens, best)

    def _chance(self, first: int, end: int) -> Chance:
        return Chance(self.seeds[first:end], self.lengths[first:end])

    def _draft(self, texts: Texts, shortest: int) -> DraftTrees:
        """A draft for every request, which may not run past the context: the target has nothing to say there."""
        room = self.target.max_length - shortest
        if self.drafting is None or self.method.shape is None or room < 1:
            return empty(len(texts.lengths), self.target.device)
        shape: Shape | None = self.method.shape.truncate(room)
        if self.pace is not None:
            shape = self.pace.shape([request.rounds for request in self.under_way], room)
        if shape is None:
            return empty(len(texts.lengths), self.target.device)
        trees = self.drafting.draft(texts, shape, self.sampling.of_drafts, self._chance(0, len(texts.lengths)))
        if texts.longest + shape.depth > self.target.max_length:
            trees = trees.truncate(self.target.max_length - texts.lengths)
        return trees

    def _verify(
        self, texts: Texts, trees: DraftTrees, layers: Sequence[int], riders: Riders | None = None
    ) -> tuple[Tensor, Features]:
        """The target's logits ``[B, N + 1, V]`` and features after the last emitted token and after every node, the
        features those after ``riders``, too; the logits after these go to the drafter."""
        last, limit = self.last[: len(texts.lengths)], self.target.max_length
        reading = Pass.trees(last, trees, texts.lengths - 1, texts.longest - 1, limit, riders)
        features = self.target.step(reading, self.cache, layers)
        if riders is None:
            return self.target.logits(features.last), features
        assert self.drafting is not None
        nodes = 1 + trees.num_nodes
        logits = self.target.logits(features.last[:, : nodes + riders.asked])
        self.drafting.hear(logits[:, nodes:])
        return logits[:, :nodes], features

    def _accept(self, trees: DraftTrees, logits: Tensor) -> rules.Verdict:
        """The path that the rule accepts of every draft, and the target's own token after it."""
        if self.sampling.greedy:
            return rules.greedy(trees, logits.argmax(-1))
        p, rule = self.sampling.probabilities(logits), self.method.rule
        if isinstance(rule, rules.LossyRule) and trees.is_chain:
            for request, divergence in zip(self.under_way, rule.divergence(trees, p), strict=True):
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
        self.processors.advance(emitted, count + 1)
        texts.lengths.add_(count + 1)
        self.last[: len(following)] = following
        return emitted

    def _note(self, trees: DraftTrees, verdict: rules.Verdict, emitted: Tensor) -> None:
        """Read what was emitted, and count it if there is a drafter: the one time that a round waits for the device."""
        drafts = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))  # [B, N]
        levels = (trees.depths * drafts).amax(-1) if trees.num_nodes else verdict.accepted
        columns = torch.stack([verdict.accepted, levels, drafts.sum(-1)], dim=1)
        for index, (accepted, depth, nodes, *tokens) in enumerate(torch.cat([columns, emitted], dim=1).tolist()):
            request = self.under_way[index]
            result = request.result
            result.tokens += tokens[: accepted + 1]
            self.processors.read(index, tokens[: accepted + 1])
            if result.trace is not None:
                path = verdict.path[index, :accepted].tolist()
                result.trace.rounds.append(Round.of(trees, index, path, tokens[accepted]))
            if self.drafting is not None:
                result.drafted.append(depth)
                result.accepted.append(accepted)
                result.nodes.append(nodes)
                if self.pace is not None:
                    request.rounds.note(depth, accepted, self.pace.sure(index, depth))
