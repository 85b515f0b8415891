"""Independent draft models: a small causal LM of its own, distilled from the target (2211.17192; 2310.08461).

B = batch or requests, T = tokens, R = B*T positions of the flat batch, n = supervised ones, m = nodes of a level, H =
the draft's hidden size, V = vocabulary.

The draft has the target's tokenizer and vocabulary; ``tli/`` is for those with another. Position r predicts token r+1,
and its teacher is the target's distribution at the same position. ``LanguageModel`` runs it in training and in
decoding, as it runs the target."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdraft.decoding.passes import Pass, Texts
from specdraft.drafters.base import Drafter, TrainingLoss, constructor_arguments
from specdraft.drafters.draft_start import attention, build_model, find_start, take_weights
from specdraft.drafters.draft_tree_builder import Vocabulary
from specdraft.drafters.drafting import LevelDrafting, ModelDrafting
from specdraft.drafters.objective import DraftHead, call_with_weights, lending_head, objective
from specdraft.drafters.on_policy import continue_answers
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import cross_entropy
from specdraft.losses.divergence import divergence as find_divergence
from specdraft.targets import Features, LanguageModel, Target
from specdraft.targets.batch import Batch
from specdraft.tensors import keeping_buffers
from specdraft.text import reason


class DraftModel(Drafter):
    """A transformers causal LM as a drafter.

    - ``model`` is its configuration, ``model_type`` included, so that ``config()`` alone rebuilds it.
    - A final soft-cap (Gemma 2), which keeps the order of logits, cannot pass through the chunked loss and is refused;
      ``for_target`` leaves it out. A logit scale is kept.
    - With ``lora`` only adapters are trained. They stay apart while training, as what resumes must be the module as
      trained; what is decoded with, saved and exported is ``served``, with the adapters merged: as fast as a model
      that never had any, and rebuilt without the checkpoint that training started from.
    - Tied embeddings are one tensor in the state dict, under the name of the embedding."""

    training_options = frozenset({"attn_implementation", "divergence", "on_policy", "activation_checkpointing"})
    reads_every_last = False
    reads_text_alone = True
    quantizable = True
    shares_tokenizer: ClassVar[bool] = True

    def __init__(
        self,
        model: Mapping[str, Any],
        attn_implementation: str = "sdpa",
        lora: Mapping[str, Any] | None = None,
        divergence: str | dict[str, Any] = "forward_kl",
        on_policy: float = 0.0,
        activation_checkpointing: bool = False,
    ) -> None:
        """Build with random weights. ``on_policy``: the share of documents whose answer the draft continues itself.
        ``activation_checkpointing``: keep each layer's input alone for backward, and run the layer again there.
        Raises UserError for a configuration or LoRA options that transformers or peft refuse, a head that the loss
        cannot fuse, an unknown divergence, or a share outside 0..1."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if not 0 <= on_policy <= 1:
            raise UserError(f"on_policy is {on_policy}: expected a share of the documents from 0 to 1")
        self.divergence, self.on_policy = find_divergence(divergence), on_policy
        if on_policy > 0 and self.divergence is cross_entropy:
            taught = "on_policy with divergence=cross_entropy would teach the draft its own tokens"
            raise UserError(f"{taught}: expected a divergence from the target's distribution, such as forward_kl")
        self._arguments = arguments | {"lora": None}
        self.model: Any = build_model(self._arguments["model"], attn_implementation)
        if activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.set_output_embeddings(lending_head(self.model))
        self.language_model = LanguageModel(self.model)
        self.register_state_dict_post_hook(_leave_out_ties)
        self.register_load_state_dict_pre_hook(_restore_ties)
        if lora is not None:
            self.adapt(lora)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        start: str = "layers",
        copy_layers: int | Sequence[int] = 2,
        shape: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
        lora: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """A draft for ``target``; ``start`` says what it begins as.

        - layers: copies of the target's embedding, final norm and head, and between them of its ``copy_layers``
          (numbers from 0; or how many, evenly spaced from the first to the last).
        - scratch: random weights in the target's architecture, with other entries of its configuration where
          ``shape`` names them (default: a quarter of the layers).
        - checkpoint: a sibling, a local directory or hub id with its tokenizer, adapted by ``lora`` if given. On the
          meta device its configuration is ``shape``, if given, so that a plan needs no hub.

        Raises UserError for a pruned vocabulary, bad options, and a sibling of another vocabulary."""
        if draft_vocabulary is not None and len(draft_vocabulary) != target.vocab_size:
            given = f"the draft vocabulary has {len(draft_vocabulary)} of {target.vocab_size} ids"
            raise UserError(f"{given}: an independent draft shares all; expected model.draft_vocab_size=null")
        if lora is not None and start != "checkpoint":
            raise UserError(f"lora adapts a trained checkpoint, but start is {start!r}: expected start=checkpoint")
        config, source, layers = find_start(
            target, start, copy_layers, shape, checkpoint, revision, cls.shares_tokenizer
        )
        draft = cls(model=config, attn_implementation=attention(target), **options)
        if (size := draft.language_model.vocab_size) != target.vocab_size:
            wanted = f"the target's, {target.vocab_size}; choose a sibling of the same vocabulary, or start=layers"
            raise UserError(f"the draft has a vocabulary of {size} tokens: expected {wanted}")
        if source is not None:
            take_weights(draft.language_model, source, layers)
        if lora is not None:
            draft.adapt(lora)
        draft.bind(target)
        return draft

    def adapt(self, lora: Mapping[str, Any]) -> None:
        """Freeze the model and add trainable adapters: peft's ``LoraConfig`` with ``alpha`` for ``lora_alpha``. Raises
        UserError for options that peft does not take, and for adapters on the head, which the loss fuses."""
        from peft import LoraConfig, get_peft_model  # here, because other drafters start a second earlier without it

        options = {"target_modules": "all-linear", **json.loads(json.dumps(dict(lora)))}
        self._arguments["lora"] = dict(options)
        if "alpha" in options:
            options["lora_alpha"] = options.pop("alpha")
        try:
            self.model = get_peft_model(self.model, LoraConfig(**options))
        except (TypeError, ValueError) as error:
            said = f"peft refuses model.drafter.lora ({reason(error)})"
            raise UserError(f"{said}: expected r, alpha, target_modules, or other options of LoraConfig") from error
        if not isinstance(self.language_model.head, DraftHead):
            raise UserError("model.drafter.lora adapts the LM head: expected target_modules without it")

    def served(self) -> Self:
        """Itself, or with adapters a copy that has them merged."""
        if self._arguments["lora"] is None:
            return self
        draft = type(self)(**(self._arguments | {"lora": None})).train(self.training)
        draft.to(self.language_model.device, self.language_model.dtype)
        draft.model.load_state_dict(copy.deepcopy(self.model).merge_and_unload().state_dict())
        draft.target = self.target
        return draft

    def export_model(self) -> PreTrainedModel:
        """A plain transformers model of the same logits, for ``save_pretrained``; it shares no memory with this one."""
        model = build_model(self._arguments["model"], self._arguments["attn_implementation"])
        with keeping_buffers(model):
            model.to(self.language_model.device, self.language_model.dtype)
        model.load_state_dict(self.served().model.state_dict())
        return model.eval()

    def prepare(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Some of the answers continued by the draft, if ``on_policy``. Raises UserError under ZeRO-3."""
        if self.on_policy == 0:
            return batch
        assert self.target is not None
        if any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
            wanted = "strategy=ddp, deepspeed_zero1 or deepspeed_zero2, or model.drafter.on_policy=0"
            raise UserError(f"on_policy samples on each rank, but ZeRO-3 needs all ranks for a pass: expected {wanted}")
        training = self.training
        self.eval()
        batch = continue_answers(batch, self.language_model, self.on_policy, self.target.eos_token_ids, generator)
        self.train(training)
        return batch

    def count_supervised(self, batch: Batch) -> Tensor:
        """One mean, over all. An answer continued by the draft may end earlier than the text that is counted."""
        return batch.before_learned().sum()[None]

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Per step the mean divergence from the target at the same positions."""
        self.bind(target)
        steps, labels = self._steps(batch, totals), batch.input_ids.flatten().roll(-1)
        last = features.last.flatten(0, 1)

        def loss(weights: list[Tensor]) -> TrainingLoss:
            rows, ids = self._taught(weights)
            return objective(rows, Teacher(last, target.logits, ids, labels), steps, self.divergence)

        return call_with_weights([self.language_model.head], loss)

    def _taught(self, weights: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Of each head the rows that learn, ``[Vd, H]``, and the target ids ``[Vd]`` that they stand for; None: all."""
        return weights, None

    def _steps(self, batch: Batch, totals: Sequence[float] | None) -> list[Step]:
        """All positions whose next token is to be learned and of the same document."""
        model = self.language_model
        supervised = batch.before_learned().flatten().nonzero()[:, 0]  # [n]
        last = model.features(batch.input_ids, batch.position_ids).last.flatten(0, 1)  # [R, H]
        total = None if totals is None else totals[0]
        return [Step(last[supervised] * model.logit_scale, supervised, 1.0, total=total)]

    def drafting(self, rows: int, capacity: int) -> LevelDrafting:
        """See ``Drafter``."""
        return DraftModelDrafting(self.language_model, rows, capacity)


class DraftModelDrafting(ModelDrafting):
    """The keys and values of all tokens of each request, and the draft's hidden state at the last one,
    ``[rows, H]``. Drafted tokens are read again when they were accepted: one pass, whatever their number."""

    def __init__(self, model: LanguageModel, rows: int, capacity: int) -> None:
        self.model, self.vocabulary = model, Vocabulary(model.vocab_size)
        self.cache = model.new_cache(rows, capacity)
        self.last = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
        self._begun: dict[int, int] = {}  # first tokens that are not read yet, by row

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""
        self._begun[row] = first_token

    @torch.inference_mode()
    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Read what was emitted."""
        lengths, longest = texts.lengths, texts.longest
        if self._begun and texts.first in self._begun:
            first = torch.tensor([[self._begun.pop(texts.first)]], device=tokens.device)
            tokens, counts, lengths, longest = torch.cat([first, tokens], dim=1), counts + 1, lengths - 1, longest - 1
        reading = Pass.text(tokens, lengths, longest, simple=len(tokens) == 1)
        read = self.model.step(reading, self.cache, (), texts.first).take((counts - 1)[:, None])
        self.last[texts.first : texts.first + len(tokens)] = read.last[:, 0]

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        return self.model.logits(self.last[: len(texts.lengths)])

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.cache.copy(last, row, length)
        self.last[row] = self.last[last]


def _tied(draft: DraftModel) -> list[str]:
    """Names of the head's weight; the first is the one that it is saved under."""
    head = draft.language_model.head.weight
    return [name for name, parameter in draft.named_parameters(remove_duplicate=False) if parameter is head]


def _leave_out_ties(draft: DraftModel, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in _tied(draft)[1:]:
        del state[prefix + name]


def _restore_ties(draft: DraftModel, state: dict[str, Any], prefix: str, *_: Any) -> None:
    first, *others = _tied(draft)
    if prefix + first in state:
        state.update({prefix + name: state[prefix + first] for name in others})
