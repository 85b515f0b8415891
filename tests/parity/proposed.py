"""The drafters that read tokens alone, which vLLM runs by a proposer of ours, in its own process."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Stop
from specdraft.drafters.base import Drafter
from specdraft.export.proposer import SETTINGS, export_proposer
from specdraft.serving.settings import ProposerSettings

SUFFIX = {"_target_": "specdraft.drafters.suffix.Suffix"}
NGRAM = {"_target_": "specdraft.drafters.ngram_cache.NgramCache"}
ENTROPY = {"_target_": "specdraft.decoding.stopping.EntropyBound", "gamma": 0.2, "least": 0.2}


@dataclass(frozen=True)
class Kind:
    """settings: the checkpoint in them is added. drafts: the short drafter that it is, if any. remembers: whether it
    drafts from earlier requests, so that counts are comparable only if both decode them one by one, in one order.
    least: acceptance length, by vLLM's count."""

    settings: ProposerSettings
    least: float
    drafts: str | None = None
    remembers: bool = True


PROPOSED = {
    "suffix": Kind(ProposerSettings(drafter=SUFFIX), 1.5),
    "suffix_else_draft": Kind(ProposerSettings(retrieval=SUFFIX), 1.5, "draft"),
    "adaptive_draft": Kind(ProposerSettings(stop=ENTROPY), 1.5, "draft", remembers=False),
    "suffix_else_ngram": Kind(ProposerSettings(drafter=NGRAM, retrieval=SUFFIX), 1.5),
}
USUAL = ("suffix", "suffix_else_draft", "adaptive_draft")


@dataclass(frozen=True)
class Proposed:
    """A drafter, the rule that ends its drafts, and what vLLM is started with."""

    drafter: Drafter
    stop: Stop | None
    started: dict[str, Any]
    least: float

    @classmethod
    def of(cls, name: str, checkpoint: Path | None, target: str, num_draft_tokens: int, work: Path) -> "Proposed":
        """Exports what the name stands for; vLLM is started with what the exported file says."""
        kind = PROPOSED[name]
        settings = replace(kind.settings, checkpoint=None if checkpoint is None else str(checkpoint))
        directory = export_proposer(settings, target, num_draft_tokens, work / "exported" / name)
        said = yaml.safe_load((directory / SETTINGS).read_text())
        started = {"flags": json.dumps(said["speculative-config"]), "additional": said["additional-config"]}
        return cls(*settings.build(), started | ({"max_num_seqs": 1} if kind.remembers else {}), kind.least)

    def shape(self, num_draft_tokens: int) -> StaticTree:
        """Of its drafts."""
        return StaticTree.chain(num_draft_tokens, sampled=False, stop=self.stop)

    def run(self, num_draft_tokens: int) -> dict[str, Any]:
        """How vLLM is started with it."""
        assert json.loads(self.started["flags"])["num_speculative_tokens"] == num_draft_tokens
        return self.started
