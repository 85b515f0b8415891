"""Multi-token prediction: a decoder layer that newer targets come with, used again for every drafted token.

N = positions of a pass, n = queries, H = hidden size, V = vocabulary.

- The layer is that of MiMo (2505.07608), after DeepSeek-V3 (2412.19437, section 2.2): ``[norm(hidden state),
  norm(embedding of the next token)]``, 2H -> H, a Qwen2 decoder layer, a norm. The embedding at position 0 counts as
  zero.
- What the last norm gives is read by the target's own projection, and by the layer itself in the place of the target's
  hidden state at the next token: one layer serves any number of tokens, and is trained so (FastMTP, 2509.18362): some
  steps of the training-time test, each weighing ``step_decay`` of the one before it.
- The hidden state is the target's last one. Engines hand MiMo's layer that before the final norm, and any other
  target's after it.

A target that has such a layer gives its weights to begin with; for any other one it is trained."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.eagle.borrowed_head import BorrowedHead
from specdraft.drafters.eagle.forward import Attends, LaterLayer, Output
from specdraft.drafters.layers import initialize, shape_of
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.weights import Weights

ARCHITECTURE = "MiMoForCausalLM"  # of a target that has the layer
OWN = "model.mtp_layers.0."  # where it keeps it
STARTS = ("auto", "own", "scratch")


class MTP(BorrowedHead, family="mtp"):
    """The layer; vLLM's method ``mtp`` loads it. Parameters are named as MiMo's, but for those of the decoder layer,
    which are kept together in ``layer``."""

    TITLE = "MTP"

    def __init__(self, layers: Sequence[int] = (), ttt_steps: int = 3, step_decay: float = 0.6, **shared: Any) -> None:
        """Build with random weights; ``shared`` is what every ``EagleHead`` takes. ``layers``: the target's last one,
        to read the hidden state before its final norm; none: after it. Raises UserError as ``EagleHead`` does, for more
        layers, and for heads of attention that do not share the width among them."""
        arguments = constructor_arguments(locals())
        super().__init__(ttt_steps=ttt_steps, step_decay=step_decay, **shared)
        self._arguments |= arguments
        self.layers = tuple(layers)
        if len(self.layers) > 1:
            raise UserError(f"layers is {list(layers)}: expected the target's last one, or none")
        config = self.layer_config
        if config.num_attention_heads * (config.head_dim or 0) != config.hidden_size:
            wrong = f"{config.num_attention_heads} heads of {config.head_dim} are not the width {config.hidden_size}"
            raise UserError(f"{wrong}: expected so, as engines run the MTP layer with heads that share the width")
        config.attention_bias, config.attention_output_bias = True, False  # as Qwen2's
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(hidden_size, epsilon)
        self.hidden_layernorm = LlamaRMSNorm(hidden_size, epsilon)
        self.input_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = LaterLayer(config)
        self.final_layernorm = LlamaRMSNorm(hidden_size, epsilon)
        self.apply(initialize)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        start: str = "auto",
        before_norm: bool | None = None,
        **options: Any,
    ) -> "MTP":
        """A layer of the shape of ``target``'s own, as engines build it from its configuration. start: the target's
        ``own`` layer or ``scratch``; ``auto``: its own if it has one. before_norm: whether it reads the hidden state
        before the final norm; None: as engines serve this target. Raises UserError for another start or one that the
        target has not, for a target whose heads cannot share its width, and a draft vocabulary that is not the whole.
        """
        if start not in STARTS:
            raise UserError(f"model.drafter.start is {start!r}: expected one of {', '.join(STARTS)}")
        cls.check_whole(target, draft_vocabulary)
        has_own = ARCHITECTURE in (getattr(target.model.config, "architectures", None) or ())
        shape = shape_of(target, None)
        heads = shape["num_attention_heads"]
        if target.hidden_size % (2 * heads):
            wrong = f"the target is {target.hidden_size} wide and has {heads} heads, whose shares cannot be rotated"
            raise UserError(f"{wrong}: expected even ones, as engines build the MTP layer so; choose another model=")
        shape["head_dim"] = target.hidden_size // heads
        before_norm = has_own if before_norm is None else before_norm
        head = cls(layers=(target.num_layers,) if before_norm else (), **shape, **options)
        head.bind(target)
        if target.device.type != "meta" and (start == "own" or (start == "auto" and has_own)):
            head.take_own(target)
        return head

    def take_own(self, target: Target) -> None:
        """Begin as the layer in the target's files. Raises UserError if there is none, or one of another shape."""
        identity = target.identity
        files = Weights(identity.name, identity.revision)
        published = {name: OWN + name.removeprefix("layer.") for name in self.state_dict()}
        if missing := next((name for name in published.values() if name not in files), None):
            wrong = f"the target {identity.name!r} has no MTP layer of its own: {missing} is not in its files"
            raise UserError(f"{wrong}; set model.drafter.start=scratch")
        read = files.read(published.values())
        try:
            self.load_state_dict({name: read[theirs].float() for name, theirs in published.items()})
        except RuntimeError as error:  # of other shapes
            wrong = f"the MTP layer of {identity.name!r} is of another shape ({' '.join(str(error).split())[:200]})"
            raise UserError(f"{wrong}: expected that of the target's own layers") from error

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``."""
        read = features.aux if self.layers else features.last  # [B, T, H]
        return read.flatten(0, 1).to(self.input_proj.weight.dtype)

    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        beyond = attends[0].sin.any(-1, keepdim=True)  # [N, 1]; at position 0 alone no angle has a sine
        token = self.token_layernorm(torch.where(beyond, embedded, 0))
        read = torch.cat([self.hidden_layernorm(feature), token.to(feature.dtype)], dim=-1)  # [N, 2H]
        output = self.final_layernorm(self.layer(self.input_proj(read), attends[0]))  # [n, H]
        return Output(output, output)
