"""Sampling as engines do where a request does not say how: by what a model is published with.

vLLM and SGLang read a model's generation_config.json, and take temperature 1 where it names none. Acceptance there is
what users of a server see who send messages and nothing else."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from specdraft.decoding.sampling import Sampling
from specdraft.errors import UserError

SERVED = "served"
"""Instead of a temperature: that of the model's generation settings, with everything else that they say."""

SHAPING = ("top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""What shapes a distribution besides the temperature."""


class Published(Protocol):
    """What is asked of a target: see ``targets/target.py``."""

    @property
    def generation_settings(self) -> Mapping[str, Any]: ...  # noqa: D102


def served(target: Published) -> Sampling:
    """As engines sample the target's model by default. Raises UserError for settings that are none, and for those that
    vLLM refuses where tokens are drafted."""
    said = {name: value for name, value in target.generation_settings.items() if value is not None}
    if said.get("min_p"):
        wrong = f"the target's generation_config.json has min_p={said['min_p']}, which vLLM refuses beside drafts"
        raise UserError(f"{wrong}: expected numbers for the temperature, top_k and top_p, or a file without it")
    chosen = {name: said[name] for name in ("temperature", *SHAPING) if name in said}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            wrong = f"the target's generation_config.json has {name}={value!r}"
            raise UserError(f"{wrong}: expected a number; mend the file, or say how to sample")
    chosen["top_k"] = max(0, int(chosen.get("top_k", 0)))  # -1 is off, too
    try:
        return replace(Sampling(1.0), **chosen)
    except UserError as error:
        raise UserError(f"in the target's generation_config.json {error}") from None


def sampling_at(target: Published, temperature: float | str) -> Sampling:
    """At a temperature, or as ``target`` is served. Raises UserError as ``served`` and ``Sampling``."""
    return served(target) if temperature == SERVED else Sampling(float(temperature))


def shaped(sampling: Sampling, given: Mapping[str, Any]) -> Sampling:
    """``sampling`` with those of ``given`` that are not None in place of its own. Raises UserError."""
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})
