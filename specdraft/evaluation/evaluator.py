"""Measure a drafter by really decoding with it, beside the same loop without it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specdraft.data.prompts import Prompt, categories_first, check_lengths, encode
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.compilation import compiling, wanted
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import describe
from specdraft.decoding.shapes import AUTO, Shape, StaticTree
from specdraft.decoding.trace import segments
from specdraft.drafters.quantization import ready_to_decode
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.losslessness import first_difference
from specdraft.evaluation.pilot import Pilot
from specdraft.evaluation.recorded import to_record
from specdraft.evaluation.results import Request, Result, distinct_ngrams, summarize
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.evaluation.speedup.advice import advise
from specdraft.evaluation.speedup.measure import costs
from specdraft.evaluation.speedup.model import CostSettings
from specdraft.evaluation.speedup.roofline import measure_roofline
from specdraft.evaluation.tuning import Answers, tuned_target
from specdraft.evaluation.turns import side_by_side
from specdraft.evaluation.ways import Way, ways_of
from specdraft.export.engine import GREEDY, Engine
from specdraft.redaction import redact
from specdraft.targets.chat_template import options_of, template_hash

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

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
    asks for the cost model of every drafter that has parameters. A drafter that tunes its target decodes with that, as
    does everything beside it; how far it is from ``target`` is measured on that one's greedy answers, and recorded.

    Raises UserError if there are no prompts or one does not fit the context, before anything is decoded, and as
    ``tuned_target`` and ``EvaluationSettings.known``."""
    settings = (settings or EvaluationSettings()).known(target).drawn_as(engine)
    check_lengths(target.tokenizer, prompts, target.max_length, settings.max_new_tokens)
    original, target = target, tuned_target(target, drafter, [*(compare or {}).values()])
    shape = settings.draft_shape(drafter, target)
    draftings = settings.draftings(engine)
    drafters = {drafter.family: drafter, **(compare or {})}
    for each in drafters.values():
        each.eval()
    recorded = {
        "num_draft_tokens": AUTO if settings.search else shape.depth,
        **{name: getattr(settings, name) for name in ("max_new_tokens", "batch_size", "seed")},
        "temperatures": list(settings.numbers),
        "sampling": to_record(settings),
        "unmeasured_sampling": settings.unmeasured(target),
        "draft_tree": str(settings.search or shape),
        "rule": describe(settings.rule),
        "grammar": settings.grammar,
        "mask_drafts": settings.mask_drafts if settings.grammar else None,
        "drafting": draftings[0],
        "engine": None if engine is None else engine.name,
        "as_engine": engine is not None and draftings[0] == engine.drafting,
        "quantization": drafter.quantization,
        "prompts": len(prompts),
        "target": asdict(target.identity),
        "chat_template_hash": template_hash(target.tokenizer),
        "chat_template_options": options_of(target.tokenizer),
        "compiled": wanted(settings.compile, target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        **(notes or {}),
    }
    if target is not original:
        asked = [encode(original.tokenizer, prompt.opening) for prompt in prompts]
        distance = Answers(original, asked, settings.max_new_tokens).distance(target)
        recorded["tuning"] = {"by": recorded.get("checkpoint"), **asdict(distance)}
    evaluation = Evaluation(redact(recorded), [], [], {}, measure_roofline(target))
    evaluator = _Evaluator(target, prompts, settings, progress, evaluation)
    pilot = Pilot(target, prompts, settings, progress, evaluation.settings)
    decoded: dict[str, Shape] = {}  # at the first temperature
    total = len(settings.numbers) * sum(1 + len(prompt.follow_ups) for prompt in prompts)
    with ExitStack() as stack:
        stack.enter_context(compiling(wanted(settings.compile, target.device)))
        inside = {module for each in drafters.values() for module in each.modules() if module is not each}
        for each in drafters.values():
            if each not in inside:  # a drafter made of others is ready with them
                stack.enter_context(ready_to_decode(each))
        bar = stack.enter_context(tqdm(total=total, desc="evaluating", unit="request", disable=not progress))
        for temperature in settings.numbers:
            ways = list(ways_of(drafters, shape, draftings if temperature else (GREEDY,)))
            if settings.search is not None:
                ways = [replace(way, shape=pilot.found(settings.search, way, temperature)) for way in ways]
            ways = [replace(way, shape=pilot.settled(way, temperature)) for way in ways]
            requests = evaluator.decode(ways, temperature, bar)
            baseline = [request.baseline.tokens for request in requests[ways[0]]]
            evaluation.distinct_4gram[temperature] = distinct_ngrams(baseline, 4)
            for way in ways:
                evaluator.report(way, temperature, requests[way], cost)
                decoded.setdefault(way.name, way.shape)
    for name, each in drafters.items():
        models = [model for model in evaluation.cost_models if model.drafter == name]
        own = [result for result in evaluation.results if result.drafter == name]
        about = (each.family, draftings[0], engine, own, settings.batch_size, decoded.get(name))
        if models and (advice := advise(models, *about)):
            # What was searched for was compared with longer ones.
            evaluation.advice.append(replace(advice, longest=advice.longest and settings.search is None))
    return evaluation


@dataclass(frozen=True)
class _Evaluator:
    """What every way is decoded with, and the evaluation that grows."""

    target: "Target"
    prompts: Sequence[Prompt]
    settings: EvaluationSettings
    progress: bool
    evaluation: Evaluation

    def report(self, way: Way, temperature: float, requests: Sequence[Request], cost: CostSettings | None) -> None:
        """Add what one way did at one temperature."""
        about = partial(summarize, seed=self.settings.seed, drafting=way.drafting, beside=way.beside)
        result = about(requests, way.name, temperature, way.shape.depth)
        self.evaluation.results.append(result)
        if way.beside:
            return
        names = sorted({prompt.category for prompt in self.prompts})
        for category in names if len(names) > 1 else ():
            own = [request for request in requests if request.category == category]
            self.evaluation.categories.append(about(own, way.name, temperature, way.shape.depth, category))
        self.evaluation.samples.extend(self._samples(result, requests))
        # Rates of chains that end where the draft is unsure say nothing of chains that go on.
        adaptive = isinstance(way.shape, StaticTree) and way.shape.stop is not None
        if cost is not None and way.drafter.draws and way.drafter.rates_hold and not adaptive:
            self._predict(way, result, requests, cost)

    def _predict(self, way: Way, result: Result, requests: Sequence[Request], cost: CostSettings) -> None:
        """The cost model at the temperature of ``result``, and what was measured of the drafts that it predicts."""
        temperature, settings = result.temperature, self.settings
        sampling = settings.sampling(temperature)
        cost = replace(cost, batch_sizes=(*cost.batch_sizes, settings.batch_size))
        found = costs(self.target, way.drafter, result, requests, way.shape, sampling, settings.rule, cost)
        if found is None:
            return
        measured = {way.shape: result}
        measure = partial(found.timer.measure_for, cost.seconds)
        if cost.check:
            ways = [Way(way.name, way.drafter, shape) for shape in found.shapes]
            # All drafts take turns on every prompt, and with the timer: the machine is to be the same for all.
            with tqdm(total=len(requests), desc="checking", unit="request", disable=not self.progress) as bar:
                again = replace(self, settings=replace(settings, samples=0)).decode(ways, temperature, bar, measure)
            about = partial(summarize, seed=settings.seed)
            measured = {each.shape: about(again[each], way.name, temperature, each.shape.depth) for each in ways}
        else:
            measure()
        self.evaluation.cost_models.append(found.model())
        self.evaluation.checks.extend(
            {
                "drafter": way.name,
                "temperature": temperature,
                "draft": str(shape),
                "tokens": shape.num_nodes,
                "batch_size": settings.batch_size,
                "acceptance_length": each.acceptance_length.value,
                "speedup": each.decoding_speedup,
            }
            for shape, each in measured.items()
        )

    def _samples(self, result: Result, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """The recorded answers, as segments that say where each came from."""
        tokenizer = self.target.tokenizer
        return [
            {
                "drafter": result.drafter,
                "temperature": result.temperature,
                "category": request.category,
                "question": self.prompts[request.prompt].opening[-1]["content"],
                "segments": [asdict(each) for each in segments(trace, len(request.drafted.tokens), tokenizer)],
            }
            for request in requests
            if (trace := request.drafted.trace) is not None
        ]

    def decode(
        self, ways: Sequence[Way], temperature: float, bar: "tqdm[Any]", after_each: Callable[[], None] = lambda: None
    ) -> dict[Way, list[Request]]:
        """All prompts, decoded without drafting and in each of the ``ways``, then ``after_each``."""
        target, settings, sampling = self.target, self.settings, self.settings.sampling(temperature)
        decoders: dict[Way | None, Decoder] = {None: Decoder(target, sampling=sampling)}
        for way in ways:
            decoders[way] = Decoder(target, way.drafter, way.shape, sampling, settings.rule)
        warm_up = encode(target.tokenizer, self.prompts[0].opening)
        for decoder in decoders.values():  # the first passes allocate buffers and choose kernels
            decoder.generate(warm_up, min(_WARM_UP_TOKENS, settings.max_new_tokens), settings.seed)
        for way in ways:  # nobody is to know an answer beforehand
            way.drafter.forget()
        requests: dict[Way, list[Request]] = {way: [] for way in ways}
        recorded = categories_first(self.prompts)[: settings.samples]
        for number, asked in enumerate(side_by_side(self.prompts, settings.batch_size)):
            texts = [encode(target.tokenizer, each.messages) for each in asked]
            seeds = [settings.seed + each.number for each in asked]
            for way in ways:
                decoders[way].trace = any(each.turn == 0 and each.prompt in recorded for each in asked)
            first = number % len(decoders)
            order = [*decoders][first:] + [*decoders][:first]
            answers = {
                way: decoders[way].generate_batch(texts, settings.max_new_tokens, len(asked), seeds) for way in order
            }
            for place, (each, ids) in enumerate(zip(asked, texts, strict=True)):
                baseline, category = answers[None][place], self.prompts[each.prompt].category
                for way in ways:
                    drafts = answers[way][place]
                    if each.turn or each.prompt not in recorded:
                        drafts.trace = None  # beside one that is recorded
                    differs = None
                    if sampling.greedy:
                        differs = first_difference(target, ids, baseline.tokens, drafts.tokens, sampling)
                    requests[way].append(Request(each.prompt, category, baseline, drafts, ids, differs))
                each.answered(answer_in_words(target.tokenizer, baseline.tokens))
            after_each()
            bar.update(len(asked))
        return requests
