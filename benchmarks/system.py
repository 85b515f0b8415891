"""One of the ways of drafting that ``systems.py`` compares, by its name there."""

import re
from functools import cache
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from common import REPOSITORY
from specdraft.data.prompts import Prompt
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.composition import composed
from specdraft.evaluation.pilot import Pilot
from specdraft.evaluation.settings import EvaluationSettings, drafted
from specdraft.evaluation.ways import Way
from specdraft.export.engine import GREEDY, SAMPLED
from specdraft.targets import Target

PLAIN = "plain"


class System:
    """A drafter made of what ``spec`` names, and the answers that it gives."""

    def __init__(self, spec: str, target: Target, num_draft_tokens: int, prompts: list[Prompt]) -> None:
        self.target = target
        self.shape: Shape = StaticTree.chain(num_draft_tokens)
        self.prompts = prompts  # of which a shape may try a few first
        spec, _, rule = spec.partition("%")
        self.rule = instantiate(OmegaConf.load(REPOSITORY / "conf/decoding/rule" / f"{rule or 'exact'}.yaml"))
        spec, _, shape = spec.partition("@")
        if shape:
            name, changed = _with_settings(shape)
            named = OmegaConf.merge(OmegaConf.load(REPOSITORY / "conf/decoding/shape" / f"{name}.yaml"), changed)
            settings = {"decoding": {"num_draft_tokens": num_draft_tokens}, "shape": named}
            self.shape = instantiate(OmegaConf.create(settings).shape)
        first, *parts = re.split(r"([+&<])(?![^(]*\))", spec)
        found: dict[str, Any] = {"drafters": [self._part(first)]}
        for kind, part in zip(parts[::2], parts[1::2], strict=True):
            found[{"+": "retrieval", "&": "ensemble", "<": "inner"}[kind]] = self._part(part)
        self.drafter: Drafter | None = None if spec == PLAIN else composed(**found)
        parameters = [] if self.drafter is None else self.drafter.parameters()
        self.weights = sum(each.nbytes for each in parameters)  # before they are packed

    def _part(self, spec: str) -> Drafter | None:
        name, changed = _with_settings(spec)
        file = REPOSITORY / "conf" / "drafter" / f"{name}.yaml"
        if name == PLAIN:
            return None
        if file.is_file():
            return instantiate(OmegaConf.merge(OmegaConf.load(file), changed))
        drafter, config = load_drafter(name)
        check_target(config, self.target)
        return drafter.to(self.target.device, self.target.dtype).eval()

    def decoder(self, temperature: float) -> Decoder:
        """One at that temperature; what was learned from requests at another one is forgotten."""
        shape = self.drafted(temperature)
        if self.drafter is not None:
            self.drafter.forget()
        return Decoder(self.target, self.drafter, shape, Sampling(temperature), self.rule)

    @cache  # noqa: B019  # a system lives as long as the run
    def drafted(self, temperature: float) -> Shape:
        """The shape of drafts at that temperature, with what a few of them told."""
        if self.drafter is None:
            return self.shape
        shape = drafted(self.shape, SAMPLED if temperature and self.drafter.draws else GREEDY)
        pilot = Pilot(self.target, self.prompts, EvaluationSettings(), False, {})
        return pilot.settled(Way(self.drafter.family, self.drafter, shape), temperature)


def _with_settings(spec: str) -> tuple[str, DictConfig]:
    """A name, and the settings in parentheses behind it."""
    name, _, options = spec.removesuffix(")").partition("(")
    return name, OmegaConf.from_dotlist([option for option in re.split(r",(?![^\[]*\])", options) if option])
