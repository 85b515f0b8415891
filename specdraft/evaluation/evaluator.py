"""Measure a drafter by really decoding with it, beside the same loop without it."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specdraft.data.sources.prompts import Prompt, check_lengths, encode
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import describe
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.decoding.trace import segments
from specdraft.evaluation import environment
from specdraft.evaluation.distinctness import distinct_ngrams
from specdraft.evaluation.losslessness import first_difference
from specdraft.evaluation.results import Request, Result, summarize
from specdraft.evaluation.settings import EvaluationSettings, drafted
from specdraft.evaluation.speedup.advice import Advice, advise
from specdraft.evaluation.speedup.measure import costs
from specdraft.evaluation.speedup.model import CostModel, CostSettings
from specdraft.export.engine import GREEDY, SAMPLED, Engine
from specdraft.files import atomic_file
from specdraft.redaction import redact
from specdraft.targets.loading import template_hash

if TYPE_CHECKING:
    from specdraft.decoding.decoder import Generation
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_BASELINE = ""  # never a drafter's name
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Evaluation:
    """All results, and what a reader needs to trust or repeat them. ``results[0]`` is the drafter under test."""

    settings: dict[str, Any]
    results: list[Result]
    categories: list[Result]
    distinct_4gram: dict[float, float]  # by temperature, of the baseline's generations
    samples: list[dict[str, Any]] = field(default_factory=list)  # drafter, temperature, category, question, segments
    cost_models: list[CostModel] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)  # what was really measured of what is predicted
    advice: list[Advice] = field(default_factory=list)  # a drafter each
    machine: dict[str, Any] = field(default_factory=environment.machine)
    versions: dict[str, str] = field(default_factory=environment.versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def at(self, temperature: float) -> list[Result]:
        """The results at one temperature, the drafter under test first."""
        return [result for result in self.results if result.temperature == temperature]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that are undefined or infinite are None."""
        return _finite(
            {
                "created": self.created,
                "settings": self.settings,
                "machine": self.machine,
                "versions": self.versions,
                "baseline": [
                    {
                        "temperature": temperature,
                        "distinct_4gram": share,
                        "tokens": alone.baseline_tokens,
                        "tokens_per_second": alone.baseline_tokens_per_second,
                        "target_step_seconds": alone.target_step_seconds,
                    }
                    for temperature, share in self.distinct_4gram.items()
                    for alone in self.at(temperature)[:1]
                ],
                "results": [result.to_dict() for result in self.results],
                "categories": [result.to_dict() for result in self.categories],
                "cost_models": [model.to_dict() for model in self.cost_models],
                "checks": self.checks,
                "advice": [advice.to_dict() for advice in self.advice],
                "samples": self.samples,
            }
        )

    def write_json(self, path: Path) -> Path:
        """Write ``to_dict()`` to ``path``; the file is whole or absent."""
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
