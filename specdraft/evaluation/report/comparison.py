"""Several drafters beside each other: in one run, or gathered from the runs of a multirun."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from specdraft.errors import UserError
from specdraft.evaluation.recorded import in_words, sampling_of
from specdraft.evaluation.report.pages import html
from specdraft.files import write_text

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter

_ALIKE = ["target", "benchmark", "prompts", "draft_tree", "batch_size", "rule", "grammar", "drafting"]
_ALIKE += ["temperatures", "sampling", "max_new_tokens", "dtype", "mask_drafts", "chat_template_options"]
_BEFORE = {"batch_size": 1, "chat_template_options": {}}  # of evaluations that do not say it
_MADE_OF = ("quantization", "retrieval", "inner", "ensemble")  # what tells drafters of one checkpoint apart
_GATHERED = ("results", "categories", "cost_models", "checks", "advice", "samples")


def names(drafters: "Sequence[Drafter]", checkpoints: Sequence[str]) -> "dict[str, Drafter]":
    """A name for each drafter but the first, which is called after its family: its family, or its run if that is taken.
    Raises UserError if one checkpoint is given twice."""
    if len(set(checkpoints)) < len(checkpoints):
        raise UserError(f"checkpoint={list(checkpoints)} names a drafter twice: expected different ones")
    first = drafters[0].family
    named: dict[str, Drafter] = {}
    for drafter, run in zip(drafters[1:], _runs(checkpoints)[1:], strict=True):
        name = drafter.family
        named[f"{name} {run}" if name in (first, *named) else name] = drafter
    return named


def gather(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One evaluation of all drafters, each called by its run; drafters that every run had beside it appear once.
    evaluations: as ``evaluation.json`` holds them. Raises UserError unless they decoded the same prompts alike, each
    with a drafter of its own."""
    first = evaluations[0]
    for key in _ALIKE:
        expected, *others = (_setting(each["settings"], key) for each in evaluations)
        for found in others:
            if found != expected:
                wrong = f"evaluations differ in {key} ({expected} and {found})"
                raise UserError(f"{wrong}: expected the same prompts, decoded alike; compare such evaluations")
    checkpoints = [each["settings"]["checkpoint"] for each in evaluations]
    called = []
    for each, run in zip(evaluations, _runs(checkpoints), strict=True):
        made_of = [str(each["settings"][part]) for part in _MADE_OF if each["settings"].get(part)]
        called.append(" ".join([each["results"][0]["drafter"], run, *made_of]))
    if twice := next((name for name in called if called.count(name) > 1), None):
        raise UserError(f"{called.count(twice)} evaluations are of {twice}, decoded alike: expected different drafters")
    together = first | {"settings": first["settings"] | {"compared": checkpoints[1:]}}
    for kind in _GATHERED:
        together[kind] = []
        for each, name in zip(evaluations, called, strict=True):
            own = each["results"][0]["drafter"]
            for record in each[kind]:
                if record["drafter"] == own:
                    label = {"label": record["label"].replace(own, name, 1)} if "label" in record else {}
                    together[kind].append(record | {"drafter": name} | label)
        together[kind] += [record for record in first[kind] if record["drafter"] != first["results"][0]["drafter"]]
    return together


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    if name == "sampling":
        return [in_words(sampling_of(settings, temperature)) for temperature in settings["temperatures"]]
    return settings.get(name, _BEFORE.get(name))


class ComparisonPage(Callback):
    """After ``evaluate.py -m checkpoint=A,B``: ``comparison.html`` beside the runs' own directories."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Gather the evaluations that the runs left."""
        folder = Path(config.hydra.sweep.dir)
        paths = sorted(folder.glob("*/evaluation.json"), key=lambda path: (len(path.parent.name), path.parent.name))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        trained = [each for each in found if each["settings"]["checkpoint"] is not None]
        if len(trained) > 1:
            try:
                page = html(gather(trained))
            except UserError as error:  # the sweep was good for something else
                print(f"comparison: none, as {error}")
                return
            print(f"comparison: {write_text(folder / 'comparison.html', page)}")


def _runs(checkpoints: Sequence[str]) -> list[str]:
    """What tells checkpoints from each other: their directories, or those of the runs that they lie in, with as many of
    the directories above as that takes."""
    places = [path.parent if path.name == "drafter" else path for path in map(Path, checkpoints)]
    found: list[str] = []
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        found = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(found)) == len(set(places)):
            break
    return found
