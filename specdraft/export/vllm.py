"""vLLM serves all families but one, each as a chain of drafts (parity is tested against vLLM 0.32; of DSpark, which it
drafts with on GPUs alone, names and shapes are)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specdraft.errors import UserError
from specdraft.export.engine import GREEDY, SAMPLED, Engine
from specdraft.export.layout import TITLES, Layout

# Targets that can be trained for, whose classes (*ForCausalLM) in vLLM 0.32 do not hand out auxiliary hidden states.
_WITHOUT_EAGLE3 = ["Cohere", "Cohere2", "Exaone4", "Falcon", "Gemma", "Gemma2", "Gemma3", "Glm4", "Glm4Moe"]
_WITHOUT_EAGLE3 += ["GraniteMoe", "Mixtral", "Olmoe", "Qwen2Moe", "StableLm"]

# Those whose classes there have no projection of their own, which an EAGLE-1 head is to share.
_WITHOUT_PROJECTION = ["Cohere", "Cohere2", "Gemma2"]

# Parts of a path from which vLLM concludes a method of its own, whatever the configuration says.
_TELLING = ("eagle-", "eagle3", "dflash", "dspark")

_NOT_SERVED = ("redrafter",)

# Families that are another method's, and what that is told.
_TOLD = {
    "p_eagle": ("eagle3", "parallel_drafting"),
    "pard": ("draft_model", "parallel_drafting"),
    "tli_draft": ("draft_model", "use_heterogeneous_vocab"),
}

# Of these vLLM takes no samples.
_NOT_SAMPLED = ("medusa", "tli_draft")


class VLLM(Engine):
    """vLLM's methods, named as the families are but for P-EAGLE, an ``eagle3`` that drafts in parallel, PARD, a
    ``draft_model`` that does, and a ``draft_model`` with another tokenizer. It drafts greedily unless told otherwise.
    target_settings: what it is to add to the target's configuration, by family.
    sampled_drafts: how it is told in its speculative configuration; Medusa's heads are not sampled whatever it says,
    and draft models with another tokenizer are refused."""

    name = "vllm"
    families: ClassVar[Mapping[str, str]] = {
        family: _TOLD[family][0] if family in _TOLD else family for family in TITLES if family not in _NOT_SERVED
    }
    quantized: ClassVar[frozenset[str]] = frozenset({"eagle3", "draft_model"})
    target_settings: ClassVar[dict[str, dict[str, object]]] = {"mtp": {"num_nextn_predict_layers": 1}}
    truncates_drafts: ClassVar[bool] = False
    sampled_drafts: ClassVar[dict[str, object]] = {"draft_sample_method": "probabilistic"}

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout as it is.
        Raises UserError for targets that vLLM hands out no hidden states or no projection of, for draft models of
        several kinds of layers, and for a directory whose name would make vLLM load the drafter as something else."""
        layout = super().accept(layout, target, directory)
        architecture = str(target.get("architecture"))
        kind, cannot = architecture.removesuffix("ForCausalLM"), f"vLLM cannot serve a {layout.title} for the target"
        if layout.family in ("eagle3", "p_eagle", "dflash", "dspark") and kind in _WITHOUT_EAGLE3:
            wanted = "auxiliary hidden states there, as Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Granite do"
            raise UserError(f"{cannot} architecture {architecture}: expected one that hands out {wanted}")
        if layout.family == "eagle" and kind in _WITHOUT_PROJECTION:
            wrong = f"{cannot} architecture {architecture}, whose class there has no lm_head that the head could share"
            raise UserError(f"{wrong}: expected another target; train model=medusa or draft for this one")
        kinds = sorted(set(layout.config.get("layer_types") or ()))
        if layout.family in ("draft_model", "pard", "tli_draft") and len(kinds) > 1:
            wrong = f"vLLM cannot serve a {layout.title} whose layers are of several kinds ({', '.join(kinds)})"
            raise UserError(f"{wrong}: expected full attention alone; choose such model.drafter.copy_layers")
        telling = [part for part in _TELLING if part in str(directory.resolve()).lower()]
        if layout.family in ("medusa", "draft_model", "pard", "tli_draft", "mtp") and telling:
            raise UserError(
                f"the path {directory.resolve()} contains {telling[0]!r}, for which vLLM would load the "
                f"{layout.title} by another method: expected none of {', '.join(_TELLING)} in it; choose with output="
            )
        return layout

    @classmethod
    def flags(cls, family: str, directory: str, num_draft_tokens: int, drafting: str = GREEDY) -> str | None:
        """The speculative configuration as JSON; None for a family that vLLM does not draft so."""
        if family not in cls.families or (drafting == SAMPLED and family in _NOT_SAMPLED):
            return None
        config = {"method": cls.families[family], "model": directory, "num_speculative_tokens": num_draft_tokens}
        config |= {_TOLD[family][1]: True} if family in _TOLD else {}
        return json.dumps(config | (cls.sampled_drafts if drafting == SAMPLED else {}))

    @classmethod
    def options(cls, family: str, directory: str, num_draft_tokens: int, drafting: str = GREEDY) -> list[str] | None:
        """The command line of ``vllm serve`` behind the target, in words; None as in ``flags``."""
        flags = cls.flags(family, directory, num_draft_tokens, drafting)
        settings = cls.target_settings.get(family)
        added = ["--hf-overrides", json.dumps(settings)] if settings else []
        return None if flags is None else [*added, "--speculative-config", flags]
