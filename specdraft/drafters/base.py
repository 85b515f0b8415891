"""What every drafter is: a module with one face for training and two for decoding."""

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from specdraft.decoding.interfaces import Drafting
from specdraft.decoding.shapes import Shape
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch
from specdraft.tensors import keeping_buffers


class TrainingLoss(NamedTuple):
    """``loss``: scalar to minimize. ``metrics``: sums under names ending in ``_sum`` and their ``_total`` counts, so
    that they can be added over steps and ranks and divided once. ``drafted``: of a draft's first token, the ascending
    flat positions ``[n]`` of the tokens before it, and whether it was the target's most likely one, bool ``[n]``; None
    where a loss does not tell. A tuple, because DeepSpeed looks for tensors in it."""

    loss: Tensor
    metrics: dict[str, Tensor]
    drafted: tuple[Tensor, Tensor] | None = None


class Drafter(nn.Module, ABC):
    """A drafter. The same module trains, decodes and is exported. What it keeps of the requests that it drafts for is
    not part of it: ``drafting`` makes that (``drafting.py``)."""

    family: ClassVar[str]
    """The word of the command line, of files and of engines, of a class: ``PromptLookup`` -> ``prompt_lookup``."""

    layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the drafter reads; empty if none."""

    training_options: ClassVar[frozenset[str]] = frozenset()
    """Constructor arguments that shape the training alone, so that a checkpoint may be trained on with others."""

    reads_every_last: ClassVar[bool] = True
    """Whether training reads every last hidden state, not only those before a token to be learned."""

    rates_hold: ClassVar[bool] = True
    """Whether what is accepted of one draft tells of drafts of other lengths: what the cost model predicts from."""

    whole_drafts: int | None = None
    """How long a draft is where decoding computes what training did: of tokens that see each other, a shorter draft is
    another one. None: of any length."""

    branches: bool = False
    """Whether its drafts have branches, even where the shape is a chain."""

    reads_text_alone: bool = False
    """Whether it drafts from tokens alone, and asks nothing else of the target: what engines let a proposer do."""

    tells_hits: ClassVar[bool] = True
    """Whether the loss tells which first tokens of drafts are right (``TrainingLoss.drafted``): what boosting asks."""

    tunes_target: ClassVar[bool] = False
    """Whether it changes the target: what decodes, and verifies, is then ``tuned(target)``."""

    quantizable: ClassVar[bool] = False
    """Whether engines read quantized weights of such a drafter."""

    quantization: str | None = None
    """The scheme that its linear layers compute in (``quantization.py``); None: with the weights as they are."""

    progress: float = 1.0
    """The share of its training that is done, told before each step: some of them change with it."""

    compiled: bool = False
    """Whether training compiles what it repeats, where the drafter has such a part."""

    files: Mapping[str, bytes] = MappingProxyType({})
    """What a checkpoint keeps of it beside its weights and its configuration, by file name."""

    target: Target | None = None
    _arguments: dict[str, Any]

    def __init_subclass__(cls, family: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.family = family or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter) and hasattr(Drafter, name):  # which Python would find instead
            raise UserError(
                f"{type(self).__name__} calls a part of it {name}, which is Drafter's: expected another name"
            )
        super().__setattr__(name, value)

    @property
    def draws(self) -> bool:
        """Whether it drafts from distributions, which can be sampled and take time to compute: what has parameters
        does. What has none chooses its tokens."""
        return next(self.parameters(), None) is not None

    def bind(self, target: Target) -> None:
        """Borrow what the drafter shares with the target (an embedding, say); it is never saved with the drafter."""
        self.target = target

    def tuned(self, target: Target) -> Target:
        """What is decoded with in the place of the ``target`` that it was trained for: that itself, unless it tunes it;
        a new one then, and the target stays as it is."""
        return target

    def num_places(self, shape: Shape) -> int:
        """The most nodes that are read when a draft of this shape is made, or verified. Raises UserError for a shape
        that it does not draft."""
        return shape.num_places

    def prepare(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The batch to train on, asked for before the target reads it; a drafter may put its own text into it."""
        return batch

    def augment(self, features: Features, generator: torch.Generator) -> Features:
        """The features of a batch to train on, which a drafter may disturb by chance; never asked for in validation."""
        return features

    def count_supervised(self, batch: Batch) -> Tensor | None:
        """How many positions of a batch each of the S means of the loss is over, ``[S]``: a step's loss is then the
        mean over those of all ranks and accumulated batches. None: another kind of loss, where batches count alike."""
        return None

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """The loss of a packed batch. Training-free drafters have none. ``totals``: what the S sums over positions are
        divided by, given to drafters that count theirs; None: the positions of this batch."""
        raise TypeError(f"{type(self).__name__} has nothing to train")

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """FLOPs per token of a training step, (forward, backward), if every position is supervised: an estimate from
        the matrices, each used once. Drafters that unroll or attend say more."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
        used = sum(matrix.numel() for matrix in matrices)
        trained = sum(matrix.numel() for matrix in matrices if matrix.requires_grad)
        return 2.0 * used, 2.0 * used + 2.0 * trained

    def activation_bytes(self, tokens: int, element: int) -> float:
        """Bytes that a training step on ``tokens`` tokens keeps for backward, ``element`` bytes a number, the loss left
        out; an estimate: the inputs of all linear layers, and as much again between them."""
        inputs = sum(module.in_features for module in self.modules() if isinstance(module, nn.Linear))
        return float(2 * inputs * tokens * element)

    def _apply(self, fn: Any, recurse: bool = True) -> "Drafter":
        with keeping_buffers(self):  # in ``to``, ``bfloat16`` and the like
            return super()._apply(fn, recurse)

    @abstractmethod
    def drafting(self, rows: int, capacity: int) -> Drafting:
        """What drafts for up to ``rows`` requests side by side, of up to ``capacity`` tokens each, drafts included."""

    def forget(self) -> None:
        """Forget what was learned from earlier requests, if anything: drafts are then those of a first request."""

    def served(self) -> "Drafter":
        """The drafter as it is decoded with, saved and exported: itself, unless training needs parts beside it."""
        return self

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able: what rebuilds the module before its weights are loaded."""
        return copy.deepcopy(getattr(self, "_arguments", {}))


def constructor_arguments(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor that begins with ``constructor_arguments(locals())``, as JSON has them. Those that
    it hands on as ``**shared`` are left out: the constructor that takes them notes them."""
    own = {name: value for name, value in variables.items() if name not in ("self", "__class__", "shared")}
    return json.loads(json.dumps(own, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value)))
