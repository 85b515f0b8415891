"""A few drafts before an evaluation, where something about its ways has to be measured first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.data.prompts import Prompt, categories_first, encode
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.pacing import Goodput, acceptance_rate, costs_of_tokens
from specdraft.decoding.shapes import AUTO, Shape, StaticTree, draft_tokens
from specdraft.decoding.stopping import Learned, Recording, learn_weights
from specdraft.evaluation.results import Request, summarize
from specdraft.evaluation.search import Search
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.evaluation.speedup.measure import accuracies, costs, typical_text
from specdraft.evaluation.speedup.model import CostModel, CostSettings
from specdraft.evaluation.speedup.step_times import StepTimer
from specdraft.evaluation.ways import Way

if TYPE_CHECKING:
    from specdraft.targets import Target

_PROMPTS, _TOKENS, _SECONDS = 8, 32, 2.0
_PASSES = 3  # of which the middle one counts: other work on the machine may hold one of them up for long


@dataclass(frozen=True)
class Pilot:
    """Decodes the beginnings of a few answers; ``recorded``: the evaluation's settings, which take what was found."""

    target: "Target"
    prompts: Sequence[Prompt]
    settings: EvaluationSettings
    progress: bool
    recorded: dict[str, Any]

    def found(self, search: Search, way: Way, temperature: float) -> Shape:
        """What promises most of all that is searched; ``way.shape`` is the longest chain of it. The usual chain where
        there are no parameters, as drafting costs nothing then."""
        sampled = isinstance(way.shape, StaticTree) and way.shape.sampled
        best: Shape = StaticTree.chain(draft_tokens(AUTO), sampled)
        if way.drafter.draws and way.drafter.rates_hold:
            requests = self._requests(way, temperature)
            trees = self._trees(search, way, temperature, requests)
            model = self._model(way, temperature, requests, trees)
            most = None if model is None else model.best(self.settings.batch_size, None)
            chain = StaticTree.chain(1 if most is None else most.tokens, sampled)
            best = next((tree for tree in trees if most is not None and str(tree) == most.draft), chain)
        self.recorded.setdefault("found_drafts", {})[f"{way.name}, T={temperature:g}"] = str(best)
        return best

    def _trees(self, search: Search, way: Way, temperature: float, requests: Sequence[Request]) -> dict[Shape, float]:
        """Those worth a try, by ``requests`` of the longest chain, each with its acceptance length: the same beginnings
        are decoded with it."""
        chains = self._model(way, temperature, requests) if search.num_nodes else None
        best = None if chains is None else chains.best(self.settings.batch_size)
        if best is None:
            return {}
        ranks = None
        if isinstance(way.shape, StaticTree) and way.shape.sampled and temperature:
            if self.settings.grammar is not None:  # ranks are of drafts without it
                return {}
            ranks = accuracies(way.drafter, self.target, requests, search.longest, search.top_k)
        found = {}
        for tree in search.trees(best.tokens, ranks):
            counts = AcceptanceCounts(tree.depth)
            for request in self._requests(replace(way, shape=tree), temperature):
                counts.add(request.drafted)
            found[tree] = counts.acceptance_length
        return found

    def settled(self, way: Way, temperature: float) -> Shape:
        """``way.shape``; if it ends by a rule for which something has to be measured, with that."""
        shape = way.shape
        stop = shape.stop if isinstance(shape, StaticTree) and way.drafter.draws else None
        if not isinstance(shape, StaticTree) or not getattr(stop, "lacks", None):
            return shape
        about = f"{way.name}, T={temperature:g}"
        if isinstance(stop, Goodput):
            stop = self._measured(stop, way, shape, temperature)
            self.recorded.setdefault("draft_costs", {})[about] = stop.costs
            self.recorded.setdefault("idle_costs", {})[about] = stop.idle
        if isinstance(stop, Learned) and stop.weights is None:
            stop = replace(stop, weights=self._weights(way, shape, temperature))
            self.recorded.setdefault("stop_weights", {})[about] = stop.weights
        return replace(shape, stop=stop)

    def _weights(self, way: Way, shape: StaticTree, temperature: float) -> list[float]:
        """What a pilot teaches a rule of what is accepted."""
        recording, levels = Recording(), torch.arange(shape.depth)
        accepted, whole = list[Tensor](), list[bool]()
        for request in self._requests(replace(way, shape=replace(shape, stop=recording)), temperature):
            rounds = request.drafted.accepted
            accepted += [levels < count for count in rounds]
            whole += [number + 1 < len(rounds) for number in range(len(rounds))]  # the last one may be cut short
        found = torch.cat(recording.found).cpu().unflatten(0, (-1, shape.depth))[whole]  # [rounds, levels, 4]
        return learn_weights(found.flatten(0, 1), torch.stack(accepted)[whole].flatten())

    def _measured(self, stop: Goodput, way: Way, shape: StaticTree, temperature: float) -> Goodput:
        """With what drafted tokens cost, and how often they are accepted. Where none was, none pays."""
        way = replace(way, shape=replace(shape, stop=None))
        requests = self._requests(way, temperature)
        model = self._model(way, temperature, requests)
        if model is None:
            return replace(stop, costs=(1.0, 1.0), expected=0.0)
        rounds: dict[int, dict[int, float]] = {}
        for each in model.predictions:
            if each.kind == "chain":
                rounds.setdefault(each.batch_size, {})[each.tokens] = each.draft_seconds + each.verify_seconds
        curves = {size: costs_of_tokens(model.target_step_seconds[size], own) for size, own in rounds.items()}
        judged = (round for each in requests for round in zip(each.drafted.drafted, each.drafted.accepted, strict=True))
        idle = self._idle(way, temperature, typical_text(requests))
        costs = curves if self.settings.batch_size > 1 else curves[1]
        return replace(stop, costs=costs, expected=acceptance_rate(judged), idle=idle)

    def _idle(self, way: Way, temperature: float, text: list[int]) -> float:
        """What a round without a draft takes, in plain steps, beyond one."""
        settings, never = self.settings, StaticTree.chain(1, stop=Goodput((1.0,), expected=0.0))
        size = settings.batch_size
        sampling = settings.sampling(temperature)
        timer = StepTimer(self.target, way.drafter, text, [never], (size,), sampling, settings.rule)
        timer.measure_for(_SECONDS / 2, _PASSES)
        seconds = [each.whole for shape in (None, never) if (each := timer.typical().get((size, shape)))]
        return max(seconds[1] / seconds[0] - 1.0, 0.0) if len(seconds) == 2 else 0.0  # unless a text ended at once

    def _model(
        self, way: Way, temperature: float, requests: Sequence[Request], trees: Mapping[Shape, float] | None = None
    ) -> CostModel | None:
        """What chains of up to ``way.shape``'s length promise, by a pilot's ``requests``, and ``trees`` of which the
        acceptance lengths are known; with the times of the steps. None if nothing was accepted."""
        settings = self.settings
        result = summarize(requests, way.name, temperature, way.shape.depth)
        sampling, cost = settings.sampling(temperature), CostSettings((settings.batch_size,), ())
        found = costs(self.target, way.drafter, result, requests, way.shape, sampling, settings.rule, cost, trees)
        if found is None:
            return None
        found.timer.measure_for(_SECONDS, _PASSES)
        return found.model(typical=True)

    def _requests(self, way: Way, temperature: float) -> list[Request]:
        """The beginnings of a few answers, one of each category. Nothing is decoded without drafting: a drafted answer
        stands for the target's own, which it equals or is distributed as."""
        target, settings = self.target, self.settings
        decoder = Decoder(target, way.drafter, way.shape, settings.sampling(temperature), settings.rule)
        way.drafter.forget()
        chosen = categories_first(self.prompts)[:_PROMPTS]
        texts = [encode(target.tokenizer, self.prompts[index].opening) for index in chosen]
        tokens, seeds = min(_TOKENS, settings.max_new_tokens), [settings.seed + index for index in chosen]
        about = f"a few drafts of {way.name}"
        stream = decoder.stream(texts, tokens, seeds, settings.batch_size)
        shown = tqdm(stream, about, len(texts), unit="request", leave=False, disable=not self.progress)
        found = [
            Request(chosen[place], self.prompts[chosen[place]].category, drafted, drafted, texts[place])
            for place, drafted in shown
        ]
        return sorted(found, key=lambda request: chosen.index(request.prompt))
