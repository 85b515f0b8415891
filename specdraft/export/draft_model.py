"""An independent draft model is a plain transformers directory, which every engine loads.

- Engines compare the vocabularies' sizes; vLLM stops drafting, without a word, behind the draft's own
  ``max_position_embeddings``.
- transformers 5 writes ``rope_parameters`` and ``dtype``; engines built on an earlier one read ``rope_theta`` (or take
  10,000 without a word), ``rope_scaling`` and ``torch_dtype``. The file says both.
- PARD is the same directory with a mask token, which vLLM reads if it is told to draft in parallel.
- A draft with another tokenizer brings one: vLLM compares the spelling of its tokens with the target's, and asks which
  of them is read in the place of all others."""

import json
import operator
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.pard import Pard
from specdraft.drafters.tli import TliDraft
from specdraft.drafters.tli.tli_draft import SERVED
from specdraft.errors import UserError
from specdraft.export.layout import DTYPES, Layout, check_finite, rope_keys

MASK = "pard_token"  # of a PARD draft: the token in the place of what is drafted


def layout(drafter: DraftModel, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of a ``DraftModel``, ``TliDraft`` or ``Pard``, adapters merged. ``target``: what the checkpoint says of
    it. Raises UserError for a draft that cannot follow the target over its whole context or speaks another vocabulary
    without a tokenizer of its own."""
    model = drafter.export_model().to(DTYPES[dtype])
    # transformers is the writer: it alone knows how an architecture's weights are named and tied on disk.
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="1TB")
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(folder) / "model.safetensors")
    config["torch_dtype"] = dtype
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # else one set for each kind of layer, which the earlier keys cannot say
        config |= rope_keys(rope)
    for key, fits, expected in (
        ("vocab_size", operator.eq, "the target's own"),
        ("max_position_embeddings", operator.ge, "at least the target's"),
    ):
        if key == "vocab_size" and isinstance(drafter, TliDraft):
            continue
        if target.get(key) is not None and not fits(config[key], target[key]):
            wrong = f"the draft model's {key} is {config[key]} and the target's {target[key]}"
            raise UserError(f"{wrong}: expected {expected}, else engines refuse it or stop drafting; train another")
    check_finite(tensors, dtype)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    facts = {"layers": str(config["num_hidden_layers"]), "parameters": f"{parameters:,}"}
    if isinstance(drafter, TliDraft):
        facts |= {
            "tokens shared with the target": f"{len(drafter.shared.draft_ids):,} of {drafter.shared.vocab_size:,}"
        }
        return Layout("tli_draft", config, tensors, dtype, facts=facts, files=_served_tokenizer(drafter))
    if not isinstance(drafter, Pard):
        return Layout("draft_model", config, tensors, dtype, facts=facts)
    facts |= {"mask token": str(drafter.mask_token), "tokens drafted at once": str(drafter.num_drafts)}
    config[MASK] = drafter.mask_token
    return Layout("pard", config, tensors, dtype, facts=facts, longest_draft=drafter.num_drafts)


def _served_tokenizer(drafter: TliDraft) -> dict[str, bytes]:
    found = {name.removeprefix(SERVED): content for name, content in drafter.files.items() if name.startswith(SERVED)}
    if not found:
        wrong = "the draft model has another tokenizer than the target, and its checkpoint has no files of it"
        raise UserError(f"{wrong}: expected {SERVED}tokenizer.json in it; restore the checkpoint")
    return found
