"""Which drafter an engine's process is to run: JSON, with the words of our command line and of ``conf/``.

``{"drafter": {"_target_": "specdraft.drafters.suffix.Suffix", "max_tree_depth": 32}}`` names what needs no training;
``checkpoint`` names a trained draft model instead, beside which there may be ``retrieval`` with
``retrieval_min_tokens``, and ``stop``, the rule by which its chains end early. No Hydra is needed to read it."""

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from specdraft.decoding.pacing import Goodput
from specdraft.decoding.stopping import Stop
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import load_drafter
from specdraft.drafters.hybrid import Hybrid
from specdraft.errors import UserError

KEY = "specdraft"


@dataclass(frozen=True)
class ProposerSettings:
    """What the JSON holds. drafter, retrieval, stop: a class by its dotted name, as ``_target_``, and its arguments.
    checkpoint: a drafter's directory."""

    drafter: Mapping[str, Any] | None = None
    checkpoint: str | None = None
    retrieval: Mapping[str, Any] | None = None
    retrieval_min_tokens: int = 2
    stop: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, additional: Any) -> "ProposerSettings":
        """From the entry ``specdraft`` of an engine's additional settings. Raises UserError if there is none, and for
        keys that are not known."""
        found = additional.get(KEY) if isinstance(additional, Mapping) else None
        known = [field.name for field in fields(cls)]
        if not isinstance(found, Mapping) or not found.keys() <= set(known):
            given = f"says {KEY}: {found!r}" if found is not None else f"has no entry {KEY}"
            wanted = f"an object with {', '.join(known)}; specdraft export writes it"
            raise UserError(f"the engine's additional configuration {given}: expected {wanted}")
        return cls(**found)

    def entry(self) -> dict[str, Any]:
        """What ``read`` reads, without what is left as it is."""
        return {KEY: {name: value for name, value in asdict(self).items() if value != getattr(type(self), name)}}

    def build(self) -> tuple[Drafter, Stop | Goodput | None]:
        """The drafter (fp32, CPU, eval mode) and its rule. Raises UserError unless it is one drafter, reads the text
        alone, and has distributions if a rule is to look at them; and as its parts do."""
        if (self.drafter is None) == (self.checkpoint is None):
            given = "neither a drafter nor a checkpoint" if self.drafter is None else "a drafter and a checkpoint"
            raise UserError(f"{KEY} names {given}: expected one of the two")
        drafter = load_drafter(self.checkpoint)[0] if self.checkpoint is not None else _build(self.drafter or {})
        retrieval = None if self.retrieval is None else _build(self.retrieval)
        for each in (drafter, retrieval):
            if each is not None and not getattr(each, "reads_text_alone", False):
                given = each.family if isinstance(each, Drafter) else type(each).__name__
                wanted = "prompt_lookup, suffix, ngram_cache, or a draft model"
                raise UserError(
                    f"{given} does not draft from tokens alone, which is all that there is: expected {wanted}"
                )
        if self.stop is not None and not drafter.draws:
            wanted = "a draft model, or no rule"
            raise UserError(f"{drafter.family} has no distributions for a rule that ends drafts: expected {wanted}")
        stop = None if self.stop is None else _build(self.stop)
        if lacks := getattr(stop, "lacks", None):
            raise UserError(f"the rule that is to end drafts ({stop}) is not measured: expected {lacks}")
        if retrieval is not None:
            drafter = Hybrid(drafter, retrieval, self.retrieval_min_tokens)
        return drafter.eval(), stop


def _build(node: Mapping[str, Any]) -> Any:
    options = dict(node)
    module, _, name = str(options.pop("_target_", "")).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        wanted = "the dotted name of a class as _target_, and its arguments"
        raise UserError(f"{dict(node)} cannot be built ({error}): expected {wanted}") from error
