"""speculators: the layout that vLLM's own trainer writes (0.9.0), which names its target, so that ``vllm serve
DIRECTORY`` starts both. Counted in vLLM 0.32 by `make parity`, but for DSpark; never run in speculators.

- There is no ``model_type`` but the layer's own: where there is one, vLLM does not take the files for speculators'.
- What is of a decoder layer stands apart, in ``transformer_layer_config``.
- The first layer of an EAGLE-3 head is ``layers.0``; a further one has one norm, where the plain layout has two names.
- speculators' blocks see all of themselves, whatever ``sliding_window_non_causal`` says, which is of windows; vLLM
  reads the key for all layers, and false makes them causal: so it is true here."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specdraft.decoding.shapes import AUTO, draft_tokens
from specdraft.errors import UserError
from specdraft.export.eagle3 import LAYERS, MASK, SIZES
from specdraft.export.engine import Engine
from specdraft.export.layout import Layout
from specdraft.targets.loading import location

_CLASSES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
_CLASSES |= {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
_OF_LAYER = [key for key in SIZES if key != "draft_vocab_size"]
_OF_LAYER += ["model_type", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling"]
_OF_LAYER += ["attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types"]
_OF_LAYER += ["bos_token_id", "eos_token_id", "pad_token_id"]
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DSPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


class Speculators(Engine):
    """The configuration of speculators 0.9.0."""

    name = "speculators"
    families: ClassVar[Mapping[str, str]] = {
        "eagle3": "eagle3",
        "p_eagle": "peagle",
        "dflash": "dflash",
        "dspark": "dspark",
    }

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout rewritten. Raises UserError as ``Engine`` does, for a causal block, which speculators has no
        word for, and for P-EAGLE's options that vLLM does not read from it."""
        layout = super().accept(layout, target, directory)
        kind, plain = self.families[layout.family], layout.config
        ignored = [flag for flag in ("fc_norm", "norm_output") if layout.family == "p_eagle" and plain[flag]]
        if ignored:
            wrong = f"the {layout.title} was trained with {', '.join(ignored)}, which vLLM reads of no peagle"
            raise UserError(f"{wrong}: expected neither; choose engine=vllm")
        config: dict[str, Any] = {
            "architectures": [_CLASSES[kind]],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": layout.longest_draft or draft_tokens(AUTO),
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": location(target["name"]), "architectures": [target.get("architecture")]},
            },
            "transformer_layer_config": {key: plain[key] for key in _OF_LAYER if key in plain},
            "draft_vocab_size": plain["draft_vocab_size"],
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "torch_dtype": layout.dtype,
        }
        if kind in ("eagle3", "peagle"):
            config |= {LAYERS: plain[LAYERS], **{flag: plain[flag] for flag in _FLAGS}}
            config |= {"mask_token_id": plain[MASK]} if MASK in plain else {}
        else:
            config |= self._block(layout)
        return replace(layout, config=config, tensors=_renamed(layout))

    @staticmethod
    def _block(layout: Layout) -> dict[str, Any]:
        plain = layout.config
        if plain["dflash_config"]["causal"]:
            wrong = f"the {layout.title} is causal within its block, which speculators has no word for"
            raise UserError(f"{wrong}: expected model.drafter.causal=false; choose engine=vllm")
        return {
            "block_size": plain["block_size"],
            "mask_token_id": plain["dflash_config"]["mask_token_id"],
            "aux_hidden_state_layer_ids": plain[LAYERS],
            "sample_from_anchor": layout.family == "dspark",
            "sliding_window_non_causal": True,
            **{key: plain[key] for key in _DSPARK if key in plain},
        }


def _renamed(layout: Layout) -> dict[str, Any]:
    """The tensors by speculators' names."""
    named = {}
    for name, tensor in layout.tensors.items():
        if name.startswith("layers.") and name.endswith(".hidden_norm.weight"):
            continue  # of a further layer of an EAGLE-3 head: the same as its input_layernorm
        named[name.replace("midlayer.", "layers.0.", 1)] = tensor
    return named
