"""How was sampled, as ``evaluation.json`` holds it in its settings: written, read again, and said to a reader."""

from collections.abc import Mapping
from typing import Any

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import SHAPING
from specdraft.evaluation.settings import EvaluationSettings


def to_record(settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
    """By temperature, what the distribution was shaped by, and in words."""
    found = {}
    for temperature in settings.numbers:
        sampling = settings.sampling(temperature)
        own = {name: getattr(sampling, name) for name in (*SHAPING, "truncates_drafts")}
        as_served = ", as the target is served" if settings.as_served(temperature) else ""
        found[f"{temperature:g}"] = own | {"said": in_words(sampling, as_served)}
    return found


def sampling_of(settings: Mapping[str, Any], temperature: float) -> Sampling:
    """That of an evaluation with these settings at a temperature. Its grammar is left out."""
    known = settings.get("sampling", {}).get(f"{temperature:g}")
    if known is None:  # before there were penalties
        return Sampling(temperature, settings.get("top_k", 0), settings.get("top_p", 1.0))
    shaped = {name: known[name] for name in SHAPING}
    return Sampling(temperature, **shaped, truncates_drafts=known.get("truncates_drafts", True))


def in_words(sampling: Sampling, as_served: str = "") -> str:
    """The sampling of the target, and of drafts where that is another."""
    drafts = "" if sampling.truncates_drafts else "; sampled drafts by the temperature alone"
    return f"{sampling}{as_served}{drafts}"


def describe(settings: Mapping[str, Any], temperature: float) -> str:
    """The same for a reader: "temperature 0.6, top_k 20, as the target is served"."""
    known = settings.get("sampling", {}).get(f"{temperature:g}")
    return in_words(sampling_of(settings, temperature)) if known is None else str(known["said"])
