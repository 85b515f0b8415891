"""What changed since the run's report: acceptance then and now, by category and position, and the traffic itself.

Then is ``evaluation.json`` of the run, now what was just decoded. Both have intervals over prompts; that of a
difference follows from the two of its parts (MOVER: Zou and Donner 2008), whose prompts are different ones."""

import math
import statistics
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any

from specdraft.data.prompts import Prompt, encode, load_prompts
from specdraft.decoding.rules import describe, rejection_sampling
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.doctor.checks import DRAFT_TOKENS, Finding, LoadedDrafter, Serving, fault, note, ok
from specdraft.doctor.traffic import Measured, length_interval, measure, total
from specdraft.errors import UserError
from specdraft.evaluation.bootstrap import Interval
from specdraft.evaluation.recorded import sampling_of
from specdraft.export.engine import SAMPLED
from specdraft.export.model_card import about_these_weights, evaluation_of
from specdraft.files import read_json
from specdraft.targets.chat_template import in_words, options_of, template_hash
from specdraft.text import counted

Record = Mapping[str, Any]
_LONGER = 1.5  # times as long, or as short, from which a length is named
_NAMED = 5  # new categories that are named
_MANY = 0.5  # share of the rounds in new categories, from which what they lose is a fault
_UNNAMED = "uncategorized"  # of prompts that say no category


def find_report(directory: Path, path: str | None, quantization: str | None = None) -> Record | None:
    """What the evaluation at ``path`` holds; without one, that in the drafter's or export's ``directory`` or beside it
    in the run, None if there is none or it is of weights quantized otherwise. Raises UserError for a file that is no
    evaluation."""
    place = evaluation_of(directory) if path is None else Path(path)
    if place is None:
        return None
    report = read_json(place)
    parts = ("results", "categories", "settings")
    if not isinstance(report, dict) or not report.get("results") or not all(part in report for part in parts):
        raise UserError(f"{place} is no evaluation: expected the evaluation.json that train.py or evaluate.py wrote")
    return about_these_weights(place, quantization) if path is None else report


def sample(
    loaded: LoadedDrafter, report: Record | None, prompts: Sequence[Prompt], serving: Serving, max_new_tokens: int
) -> list[Measured]:
    """The traffic, decoded as the report was, or without one as the checkpoint says."""
    if report is None:
        depth = loaded.recorded("decoding", "num_draft_tokens") or DRAFT_TOKENS
        return measure(
            loaded, prompts, depth, max_new_tokens, Sampling(serving.temperature or 0.0), serving.system_prompt
        )
    row, length = then_row(report, serving), int(report["settings"]["max_new_tokens"])
    sampling = sampling_of(report["settings"], row["temperature"])
    chain = StaticTree.chain(row["num_draft_tokens"], sampled=row["drafting"] == SAMPLED)
    return measure(loaded, prompts, chain, length, sampling, serving.system_prompt)


def then_row(report: Record, serving: Serving) -> Record:
    """The result of the drafter under test, at the recorded temperature that is nearest to the served one."""
    first = report["results"][0]
    wanted = first["temperature"] if serving.temperature is None else serving.temperature
    rows = [row for row in report["results"] if row["drafter"] == first["drafter"] and not row["beside"]]
    return min(rows, key=lambda row: abs(row["temperature"] - wanted))


def check_drift(
    loaded: LoadedDrafter, report: Record | None, serving: Serving, now: Sequence[Measured]
) -> dict[str, Finding]:
    """The findings about a traffic of which ``now`` is a ``sample``, against the report."""
    if report is None:
        mend = "evaluate the run on what it was trained for, and give the evaluation.json with report="
        lacking = "there is no evaluation.json of these weights beside the checkpoint to compare the traffic with"
        return {"drift": note(f"{lacking}: {mend}")}
    row = then_row(report, serving)
    if other := _otherwise(report, row):
        return {"drift": note(f"the report {other} to compare with it")}
    old = [each for each in report["categories"] if _same(each, row)]
    found = {
        "drift": _overall(row, now, report["settings"].get("num_draft_tokens") == "auto"),
        "drift by category": _categories(row, old, now),
        "drift by position": _positions(row, now),
        "drift of the traffic": _traffic(loaded, report, row, now),
    }
    if serving.temperature is not None and serving.temperature != row["temperature"]:
        said = f"served at {serving.temperature:g}, in the report at {row['temperature']:g}, at which this was measured"
        mend = f"evaluate the run with decoding.temperature={serving.temperature:g} and give that report"
        found["drift of the temperature"] = note(f"{said}: {mend}")
    return found


def _otherwise(report: Record, row: Record) -> str | None:
    """What the report did that the traffic's chains do not, and how to mend it; None: nothing."""
    settings, depth = report["settings"], row["num_draft_tokens"]
    drafted, chains = settings["draft_tree"], [str(StaticTree.chain(depth, sampled)) for sampled in (True, False)]
    if row["nodes_per_round"] > depth:
        return "drafted trees: evaluate again with decoding/shape=chain"
    if drafted.startswith("chain of") and drafted not in chains:
        return "ended drafts where they were unsure: evaluate again with decoding/shape=chain"
    if settings.get("grammar"):
        return "followed a grammar: evaluate again with decoding.grammar=null"
    if row["temperature"] and settings["rule"] != describe(rejection_sampling):
        return f"accepted by another rule ({settings['rule']}): evaluate again with decoding/rule=exact"
    return None


def _same(each: Record, row: Record) -> bool:
    return all(each[name] == row[name] for name in ("drafter", "temperature", "beside"))


def _overall(row: Record, now: Sequence[Measured], adaptive: bool) -> Finding:
    counts = total(now)
    if not counts.rounds:
        return note("every answer ends with its first token, so nothing was drafted: give other prompts with traffic=")
    here = _span(counts.acceptance_length, length_interval(now))
    before = _span(row["acceptance_length"], row["acceptance_length_interval"])
    depth = f"K = {row['num_draft_tokens']}" + (", which the report found to pay" if adaptive else ", as in the report")
    said = f"acceptance length {here} on {counted(len(now), 'request')} ({depth}), in the report {before}"
    change = _change(row, now)
    if change is None:
        return note(f"{said}; too few prompts to say whether they differ")
    (low, high), said = change[1], f"{said}: {_signed(change)}"
    if high < 0:
        return fault(f"{said}; train on the worst requests, which worst=FILE.jsonl writes (docs/troubleshooting.md)")
    return ok(f"{said}, {'better' if low > 0 else 'no difference for certain'}")


def _change(row: Record, now: Sequence[Measured]) -> tuple[float, Interval] | None:
    """Of the acceptance length since ``row``; None where nothing was drafted or an interval is missing."""
    counts, interval = total(now), length_interval(now)
    before = row["acceptance_length_interval"]
    return (
        None
        if interval is None or before is None or not counts.rounds
        else difference(row["acceptance_length"], before, counts.acceptance_length, interval)
    )


def difference(
    then: float, then_interval: Sequence[float], now: float, now_interval: Sequence[float]
) -> tuple[float, Interval]:
    """``now - then`` and its interval, from those of two independent samples (Zou and Donner 2008, equation 5)."""
    low = now - then - math.hypot(now - now_interval[0], then_interval[1] - then)
    high = now - then + math.hypot(now_interval[1] - now, then - then_interval[0])
    return now - then, (low, high)


def _categories(row: Record, old: Sequence[Record], now: Sequence[Measured]) -> Finding:
    """Which categories are new and whether they lie below the report's length of all, ``row``; which fell by
    themselves; and what another mix of the same ones makes. Requests without a category are in none."""
    then = {each["category"]: each for each in old}
    by_name: dict[str, list[Measured]] = {}
    for each in now:
        if each.counts.rounds:
            by_name.setdefault(each.prompt.category, []).append(each)
    rounds = {name: total(each).rounds for name, each in by_name.items()}
    largest = sorted(by_name, key=lambda name: -rounds[name])
    if not then or not largest:
        return note("the report has no categories, or nothing was drafted: nothing to compare by category")
    new = [name for name in largest if name not in then and name != _UNNAMED]
    shared = [name for name in largest if name in then]
    share = sum(rounds[name] for name in new) / sum(rounds.values())
    change = _change(row, [each for name in new for each in by_name[name]]) if new else None
    worse, sentences = change is not None and change[1][1] < 0, []
    if new:
        named = ", ".join(f"{name} {_length(by_name[name])}" for name in new[:_NAMED])
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        known = f"it has {', '.join(then)}"
        sentences.append(f"{share:.0%} of the rounds are of categories that the report lacks ({known}): {named}{more}")
    if change is not None:
        sentences.append(f"these differ from all of the report by {_signed(change)}")
    unnamed = _UNNAMED in rounds and _UNNAMED not in then
    if unnamed:
        part = rounds[_UNNAMED] / sum(rounds.values())
        sentences.append(f"{part:.0%} of the rounds are of requests that name no category and are not compared by it")
    changes = {name: _change(then[name], by_name[name]) for name in shared}
    fell = {name: each for name, each in changes.items() if each is not None and each[1][1] < 0}
    sentences += [f"{name} itself changed by {_signed(each)}" for name, each in fell.items()]
    if len(shared) > 1:
        sentences.append(f"the mix of the categories that both have makes {_mix(then, rounds, shared):+.2f}")
    bad = bool(fell) or (worse and share > _MANY)
    return (fault if bad else note if new or unnamed else ok)(
        "; ".join(sentences) or f"{', '.join(shared)} as in the report"
    )


def _mix(then: Mapping[str, Record], rounds: Mapping[str, int], shared: Sequence[str]) -> float:
    """The lengths of then, weighted by the rounds of now, less the same by those of then."""
    lengths = [then[name]["acceptance_length"] for name in shared]
    shares = [[rounds[name] for name in shared], [then[name]["rounds"] for name in shared]]
    now, before = (sum(map(mul, lengths, each)) / sum(each) for each in shares)
    return float(now - before)


def _positions(row: Record, now: Sequence[Measured]) -> Finding:
    """Where in the draft acceptance is lost."""
    counts = total(now)
    pairs = list(
        zip(
            row["conditional_acceptance_rate"],
            row["conditional_acceptance_interval"],
            counts.conditional_acceptance_rate,
            strict=False,
        )
    )
    said = ", ".join(f"{old:.2f} → {new:.2f}" for old, _, new in pairs if old is not None and not math.isnan(new))
    below = [place for place, (_, bounds, new) in enumerate(pairs, start=1) if bounds is not None and new < bounds[0]]
    if not below:
        return ok(f"conditional acceptance by position {said}")
    where = "the first draft already" if below[0] == 1 else f"position {below[0]} on, while the first holds"
    meaning = "the text is another" if below[0] == 1 else "the head's own errors add up faster"
    return note(f"conditional acceptance by position {said}: below the report's interval from {where}: {meaning}")


def _traffic(loaded: LoadedDrafter, report: Record, row: Record, now: Sequence[Measured]) -> Finding:
    """Template, system prompts, temperature and lengths, then and now."""
    settings, found = report["settings"], []
    template = template_hash(loaded.target.tokenizer)
    if settings.get("chat_template_hash") != template:
        found.append(f"the chat template is {template}, the report's {settings.get('chat_template_hash')}")
    options, theirs = options_of(loaded.target.tokenizer), settings.get("chat_template_options") or {}
    if options != theirs:
        found.append(f"prompts are rendered with {in_words(options)}, the report's with {in_words(theirs)}")
    told = sum(each.prompt.opening[0]["role"] == "system" for each in now) / len(now)
    answers = statistics.fmean(each.answer_tokens for each in now)
    lengths = [("answers have", row["tokens"] / max(row["requests"], 1), answers)]
    before = _report_prompts(loaded, settings)
    if before:
        asked = statistics.fmean(len(encode(loaded.target.tokenizer, each.opening)) for each in before)
        lengths.append(("prompts have", asked, statistics.fmean(each.prompt_tokens for each in now)))
        told_before = sum(each.opening[0]["role"] == "system" for each in before) / len(before)
        if abs(told - told_before) > 0.5:
            found.append(f"{told:.0%} of the requests have a system prompt, {told_before:.0%} of the report's")
    for what, then, there in lengths:
        if not 1 / _LONGER < there / max(then, 1e-9) < _LONGER:
            found.append(f"{what} {there:.0f} tokens, in the report {then:.0f}")
    return note("; ".join(found)) if found else ok("template and lengths as in the report")


def _report_prompts(loaded: LoadedDrafter, settings: Record) -> list[Prompt]:
    """The prompts of the report, where they are still there."""
    try:
        return load_prompts(settings["benchmark"], settings["prompts"])
    except (UserError, KeyError):
        return []


def _signed(change: tuple[float, Interval]) -> str:
    value, (low, high) = change
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _length(requests: Sequence[Measured]) -> str:
    return _span(total(requests).acceptance_length, length_interval(requests))


def _span(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
