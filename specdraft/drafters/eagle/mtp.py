"""Multi-token prediction: a decoder layer that newer targets come with, used again for every drafted token.

N = positions of a pass, n = queries, H = hidden size, V = vocabulary.

- The layer is that of MiMo (2505.07608), after DeepSeek-V3 (2412.19437, section 2.2): ``[norm(hidden state),
  norm(embedding of the next token)]``, 2H -> H, a Qwen2 decoder layer, a norm. The embedding at position 0 counts as
  zero. For GLM-4-MoE it is that model's own: the embedding first, a part of each head rotated, a mixture of experts.
- What the last norm gives is read by the target's own projection, and by the layer itself in the place of the target's
  hidden state at the next token: one layer serves any number of tokens, and is trained so (FastMTP, 2509.18362): some
  steps of the training-time test, each weighing ``step_decay`` of the one before it. GLM's reads what goes into that
  norm, as vLLM has it.
- The hidden state is the target's last one. Engines hand MiMo's layer that before the final norm, and any other
  target's after it.

A target that has such a layer gives its weights to begin with; for any other one it is trained."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.eagle.borrowed_head import BorrowedHead
from specdraft.drafters.eagle.experts import SETTINGS, mixture, published, routed_weights, stacked
from specdraft.drafters.eagle.forward import Attends, LaterLayer, Output
from specdraft.drafters.eagle.mtp_layouts import LAYOUTS, USUAL, layout_of, refuse_others
from specdraft.drafters.layers import RMSNorm, initialize, shape_of
from specdraft.drafters.rotary import RotaryTable
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.weights import Weights

STARTS = ("auto", "own", "scratch")


class MTP(BorrowedHead, family="mtp"):
    """The layer; vLLM's method ``mtp`` loads it. Parameters are named as MiMo's, but for those of the decoder layer,
    which are kept together in ``layer``."""

    TITLE = "MTP"

    def __init__(
        self,
        layers: Sequence[int] = (),
        ttt_steps: int = 3,
        step_decay: float = 0.6,
        layout: str = USUAL,
        qk_norm: bool = False,
        attention_bias: bool = True,
        rotated: float = 1.0,
        experts: Mapping[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        """Build with random weights; ``shared`` is what every ``EagleHead`` takes. ``layers``: the target's last one,
        to read the hidden state before its final norm; none: after it. ``layout``: of ``LAYOUTS``. ``qk_norm``: norms
        of queries and keys; ``attention_bias``: of queries, keys and values; ``rotated``: the share of a head that
        positions rotate; ``experts``: the settings of a mixture in the place of the MLP. Raises UserError as
        ``EagleHead`` does, for more layers, no such layout, and where engines want it, for heads of attention that do
        not share the width among them."""
        arguments = constructor_arguments(locals())
        super().__init__(ttt_steps=ttt_steps, step_decay=step_decay, **shared)
        self._arguments |= arguments
        if layout not in LAYOUTS:
            raise UserError(f"layout is {layout!r}: expected one of {', '.join(LAYOUTS)}")
        self.layers, self.layout, self.experts = tuple(layers), LAYOUTS[layout], experts
        if len(self.layers) > 1:
            raise UserError(f"layers is {list(layers)}: expected the target's last one, or none")
        config = self.layer_config
        assert config.head_dim is not None
        if self.layout.shares_width and config.num_attention_heads * config.head_dim != config.hidden_size:
            wrong = f"{config.num_attention_heads} heads of {config.head_dim} are not the width {config.hidden_size}"
            raise UserError(f"{wrong}: expected so, as engines run the MTP layer with heads that share the width")
        config.attention_bias, config.attention_output_bias = attention_bias, False  # as Qwen2's
        if rotated != 1.0:
            turned = copy.deepcopy(config)
            turned.head_dim = int(config.head_dim * rotated)
            self.rotary = RotaryTable(turned)
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = RMSNorm(hidden_size, epsilon)
        self.hidden_layernorm = RMSNorm(hidden_size, epsilon)
        self.input_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        mlp = None if experts is None else mixture(hidden_size, config.hidden_act, experts)
        self.layer = LaterLayer(config, qk_norm, mlp)
        self.final_layernorm = RMSNorm(hidden_size, epsilon)
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
        target has not, for a target of which engines cannot build a layer, whose heads cannot share its width, or whose
        layer is of another layout, and a draft vocabulary that is not the whole."""
        if start not in STARTS:
            raise UserError(f"model.drafter.start is {start!r}: expected one of {', '.join(STARTS)}")
        cls.check_whole(target, draft_vocabulary)
        layout, has_own = layout_of(target)
        shape = shape_of(target, None) | {"layout": layout}
        if LAYOUTS[layout].shares_width:
            heads, config = shape["num_attention_heads"], target.config
            if getattr(config, "hidden_act", None) != "silu" or not hasattr(config, "rms_norm_eps"):
                wrong = f"the configuration of {target.architecture} has no hidden_act silu or no rms_norm_eps"
                raise UserError(f"{wrong}: expected both, as engines build the MTP layer by it; choose another model=")
            if target.hidden_size % (2 * heads):
                wrong = f"the target is {target.hidden_size} wide and has {heads} heads, whose shares cannot be rotated"
                raise UserError(
                    f"{wrong}: expected even ones, as engines build the MTP layer so; choose another model="
                )
            shape["head_dim"] = target.hidden_size // heads
        else:
            shape |= _of_experts(target.config)
        before_norm = has_own and LAYOUTS[layout].before_norm if before_norm is None else before_norm
        begins = target.device.type != "meta" and start != "scratch"
        if begins and not has_own:
            refuse_others(target)
        head = cls(layers=(target.num_layers,) if before_norm else (), **shape, **options)
        head.bind(target)
        if begins and (start == "own" or has_own):
            head.take_own(target)
        return head

    def take_own(self, target: Target) -> None:
        """Begin as the layer in the target's files. Raises UserError if there is none, or one of another shape."""
        identity = target.identity
        files = Weights(identity.name, identity.revision)
        names = self._names(target.num_layers)
        if missing := next((name for name in names if name not in files), None):
            wrong = f"the target {identity.name!r} has no MTP layer of its own: {missing} is not in its files"
            raise UserError(f"{wrong}; set model.drafter.start=scratch")
        self.take(files.read(names), target.num_layers, repr(identity.name))

    def take(self, tensors: Mapping[str, Tensor], layers: int, source: str) -> None:
        """Take the weights that ``source``, in words, calls by the names of the layout. Raises UserError for tensors of
        another shape, too few or too many."""
        names = self._names(layers)
        try:
            self.load_state_dict(stacked({names.get(name, name): tensor.float() for name, tensor in tensors.items()}))
        except RuntimeError as error:
            wrong = f"the MTP layer of {source} is of another shape ({' '.join(str(error).split())[:200]})"
            raise UserError(f"{wrong}: expected that of the target's own layers") from error

    def published(self, layers: int) -> dict[str, Tensor]:
        """The tensors by the names of the layout, for a target of so many layers; those of experts one by one."""
        tensors = published(self.state_dict())
        return {theirs: tensors[ours] for theirs, ours in self._names(layers).items()}

    def _names(self, layers: int) -> dict[str, str]:
        """Of the layout to those of ``published``."""
        return {self.layout.published(name, layers): name for name in published(self.state_dict())}

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``."""
        read = features.aux if self.layers else features.last  # [B, T, H]
        return read.flatten(0, 1).to(self.input_proj.weight.dtype)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """With the experts that a position passes through."""
        forward, backward = super().training_flops(sequence_length)
        if self.experts is None:
            return forward, backward
        routed = self.passes * 2.0 * routed_weights(self.experts, self.layer_config.hidden_size)
        return forward + routed, backward + 2.0 * routed

    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        beyond = attends[0].sin.any(-1, keepdim=True)  # [N, 1]; at position 0 alone no angle has a sine
        token = self.token_layernorm(torch.where(beyond, embedded, 0)).to(feature.dtype)
        state = self.hidden_layernorm(feature)
        read = torch.cat([state, token] if self.layout.state_first else [token, state], dim=-1)  # [N, 2H]
        output = self.layer(self.input_proj(read), attends[0])  # [n, H]
        normed = self.final_layernorm(output)
        return Output(normed, normed if self.layout.normed_again else output)


def _of_experts(config: Any) -> dict[str, Any]:
    """The arguments of GLM-4-MoE's layer."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    return {
        "intermediate_size": settings["moe_intermediate_size"]
        * (settings["num_experts_per_tok"] + settings["n_shared_experts"]),
        "qk_norm": bool(config.use_qk_norm),
        "attention_bias": bool(config.attention_bias),
        "rotated": float(config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "experts": settings,
    }
