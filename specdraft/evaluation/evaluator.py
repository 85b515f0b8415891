"""Measure a drafter by really decoding with it, beside the same loop without it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specdraft.data.prompts import Prompt, check_lengths, encode
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import describe
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.decoding.trace import segments
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.losslessness import first_difference
from specdraft.evaluation.results import Request, Result, distinct_ngrams, summarize
from specdraft.evaluation.settings import EvaluationSettings, drafted
from specdraft.evaluation.speedup.advice import advise
from specdraft.evaluation.speedup.measure import costs
from specdraft.evaluation.speedup.model import CostModel, CostSettings
from specdraft.export.engine import GREEDY, SAMPLED, Engine
from specdraft.redaction import redact
from specdraft.targets.loading import template_hash

if TYPE_CHECKING:
    from specdraft.decoding.decoder import Generation
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_BASELINE = ""  # never a drafter's name
_WARM_UP_TOKENS = 16


def evaluate(
    target: "Target",
    drafter: "Drafter",
    prompts: Sequence[Prompt],
    settings: EvaluationSettings | None = None,
    compare: "Mapping[str, Drafter] | None" = None,
    notes: Mapping[str, Any] | None = None,
    progress: bool = True,
    cost: CostSettings | None = None,
    engine: Engine | None = None,
) -> Evaluation:
    """Decode all prompts without drafting, with ``drafter`` and with each drafter of ``compare``, at each temperature.

    Above temperature 0 drafts are made as ``settings.drafting`` says; "as the engine" is as ``engine`` drafts, with the
    other way measured beside it for every drafter that has parameters.

    The ways of decoding take turns on every prompt, the first place rotating, so that a machine that slows down or
    speeds up does so for all of them. In a conversation of several turns every way continues the baseline's answers:
    all decode the same token ids. ``notes`` are added to the recorded settings (benchmark, checkpoint, ...). ``cost``
    asks for the cost model of every drafter that has parameters.

    Raises UserError if there are no prompts or one does not fit the context, before anything is decoded.
    """
    settings = settings or EvaluationSettings()
    check_lengths(target.tokenizer, prompts, target.max_length, settings.max_new_tokens)
    shape = settings.draft_shape(drafter, target)
    draftings = settings.draftings(engine)
    drafters = {family(drafter): drafter, **(compare or {})}
    for each in drafters.values():
        each.eval()
    results: list[Result] = []
    categories: list[Result] = []
    distinctness: dict[float, float] = {}
    samples: list[dict[str, Any]] = []
    models: list[CostModel] = []
    checks: list[dict[str, Any]] = []
    names = sorted({prompt.category for prompt in prompts})
    total = len(settings.temperatures) * sum(1 + len(prompt.follow_ups) for prompt in prompts)
    with tqdm(total=total, desc="evaluating", unit="request", disable=not progress) as bar:
        for temperature in settings.temperatures:
            ways = list(_ways(drafters, shape, draftings if temperature else (GREEDY,)))
            drafts = {way.key: (drafters[way.name], way.shape) for way in ways}
            requests = _decode(target, drafts, prompts, settings, temperature, bar)
            baseline = [request.baseline.tokens for request in requests[ways[0].key]]
            distinctness[temperature] = distinct_ngrams(baseline, 4)
            for way in ways:
                decoded = requests[way.key]

                about = partial(summarize, seed=settings.seed, drafting=way.drafting, beside=way.beside)
                results.append(about(decoded, way.name, temperature, way.shape.depth))
                if way.beside:
                    continue
                for category in names if len(names) > 1 else ():
                    own = [request for request in decoded if request.category == category]
                    categories.append(about(own, way.name, temperature, way.shape.depth, category))
                samples += _samples(target, results[-1], decoded, prompts)
                if cost is not None and _trained(drafters[way.name]):
                    predicted = _predict(
                        target, drafters[way.name], prompts, settings, way.shape, results[-1], decoded, cost, progress
                    )
                    models += predicted[0]
                    checks += predicted[1]
    recorded = {
        "num_draft_tokens": shape.depth,
        "temperatures": list(settings.temperatures),
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "draft_tree": str(shape),
        "rule": describe(settings.rule),
        "drafting": draftings[0],
        "engine": None if engine is None else engine.name,
        "prompts": len(prompts),
        "target": asdict(target.identity),
        "chat_template_hash": template_hash(target.tokenizer),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        **(notes or {}),
    }
    of = {name: [model for model in models if model.drafter == name] for name in drafters}
    advice = [
        found
        for name, own in of.items()
        if own and (found := advise(own, family(drafters[name]), draftings[0], engine)) is not None
    ]
    return Evaluation(redact(recorded), results, categories, distinctness, samples, models, checks, advice)


@dataclass(frozen=True)
class Way:
    """A way of drafting above temperature 0, or at it: a drafter by name, a shape, tokens sampled or chosen."""

    name: str
    shape: Shape
    beside: bool

    @property
    def drafting(self) -> str:
        """Of this shape: sampled, or greedy."""
        return SAMPLED if isinstance(self.shape, StaticTree) and self.shape.sampled else GREEDY

    @property
    def key(self) -> str:
        """Unique among the ways."""
        return f"{self.name} {self.drafting}"


def _ways(drafters: "Mapping[str, Drafter]", shape: Shape, draftings: Sequence[str]) -> Iterator[Way]:
    """The first drafting with every drafter, then the other ones with those that it makes a difference to."""
    for beside, drafting in enumerate(draftings):
        for name, drafter in drafters.items():
            # What has no parameters chooses its tokens: it has no distribution to sample from.
            way = Way(name, drafted(shape, drafting if _trained(drafter) else GREEDY), bool(beside))
            if not beside or (_trained(drafter) and isinstance(shape, StaticTree)):
                yield way


def _trained(drafter: "Drafter") -> bool:
    return next(drafter.parameters(), None) is not None


def _predict(
    target: "Target",
    drafter: "Drafter",
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    shape: Shape,
    result: Result,
    requests: Sequence[Request],
    cost: CostSettings,
    progress: bool,
) -> tuple[list[CostModel], list[dict[str, Any]]]:
    """The cost model at the temperature of ``result``, and what was measured of the drafts that it predicts."""
    name, temperature = result.drafter, result.temperature
    found = costs(target, drafter, result, requests, shape, settings.sampling(temperature), settings.rule, cost)
    if found is None:
        return [], []
    if not cost.check:
        found.timer.measure_for(cost.seconds)
        return [found.model()], [_checked(result, shape, name)]
    drafts = {str(other): (drafter, other) for other in found.shapes}
    changed = replace(settings, samples=0)
    with tqdm(total=len(requests), desc="checking", unit="request", disable=not progress) as bar:
        # All drafts take turns on every prompt, and with the timer: the machine is to be the same for all.
        measure = partial(found.timer.measure_for, cost.seconds)
        again = _decode(target, drafts, prompts, changed, temperature, bar, measure)
    checks = [
        _checked(summarize(again[str(other)], name, temperature, other.depth, seed=settings.seed), other, name)
        for other in found.shapes
    ]
    return [found.model()], checks


def _checked(result: Result, shape: Shape, drafter: str) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "temperature": result.temperature,
        "draft": str(shape),
        "tokens": shape.num_nodes,
        "acceptance_length": result.acceptance_length.value,
        "speedup": result.decoding_speedup,
    }


def _samples(
    target: "Target", result: Result, requests: Sequence[Request], prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """The recorded answers, as segments that say where each came from."""
    return [
        {
            "drafter": result.drafter,
            "temperature": result.temperature,
            "category": request.category,
            "question": prompts[request.prompt].opening[-1]["content"],
            "segments": [asdict(each) for each in segments(trace, len(request.drafted.tokens), target.tokenizer)],
        }
        for request in requests
        if (trace := request.drafted.trace) is not None
    ]


def _decode(
    target: "Target",
    drafts: "Mapping[str, tuple[Drafter, Shape]]",
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    temperature: float,
    bar: "tqdm[Any]",
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, list[Request]]:
    """All prompts, decoded without drafting and with each of the named ``drafts``, then ``after_each``."""
    sampling = settings.sampling(temperature)
    decoders = {_BASELINE: Decoder(target, sampling=sampling)}
    for name, (drafter, shape) in drafts.items():
        decoders[name] = Decoder(target, drafter, shape, sampling, settings.rule)
    ways = list(decoders)
    warm_up = encode(target.tokenizer, prompts[0].opening)
    for name in ways:  # the first passes allocate buffers and choose kernels
        decoders[name].generate(warm_up, min(_WARM_UP_TOKENS, settings.max_new_tokens), settings.seed)
    requests: dict[str, list[Request]] = {name: [] for name in drafts}
    recorded = _one_of_each_category(prompts)[: settings.samples]
    number = 0
    for index, prompt in enumerate(prompts):
        messages = list(prompt.opening)
        for turn in range(1 + len(prompt.follow_ups)):
            ids = encode(target.tokenizer, messages)
            first = number % len(ways)
            for name in drafts:
                decoders[name].trace = turn == 0 and index in recorded
            generations: dict[str, Generation] = {
                name: decoders[name].generate(ids, settings.max_new_tokens, settings.seed + number)
                for name in ways[first:] + ways[:first]
            }
            baseline = generations[_BASELINE]
            for name in drafts:
                generation = generations[name]
                differs = first_difference(target, ids, baseline.tokens, generation.tokens) if sampling.greedy else None
                requests[name].append(Request(index, prompt.category, baseline, generation, ids, differs))
            if turn < len(prompt.follow_ups):
                answer = answer_in_words(target.tokenizer, baseline.tokens)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": prompt.follow_ups[turn]},
                ]
            number += 1
            after_each()
            bar.update()
    return requests


def _one_of_each_category(prompts: Sequence[Prompt]) -> list[int]:
    """The numbers of all prompts, those first that are the first of their category."""
    first = list({prompt.category: index for index, prompt in reversed(list(enumerate(prompts)))}.values())
    return sorted(first) + [index for index in range(len(prompts)) if index not in first]


def family(drafter: "Drafter") -> str:
    """``PromptLookup`` -> ``prompt_lookup``: the word of the command line and of the JSON file."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(drafter).__name__).lower()
