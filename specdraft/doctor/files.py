"""Checks of what the files say; the target computes nothing. V = vocabulary, H = hidden size of the target."""

import torch
from torch.nn.functional import normalize

from specdraft.doctor.checks import Finding, LoadedDrafter, Serving, fault, note, ok
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target, check_target, other_options
from specdraft.drafters.dflash import DFlash
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.eagle.head import EagleHead
from specdraft.drafters.layers import shape_of
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.export.eagle3 import LAYERS, layout
from specdraft.export.layout import DTYPES
from specdraft.onednn import plain
from specdraft.targets.chat_template import in_words, options_of, template_hash
from specdraft.targets.loading import load_tokenizer

_MARGIN = 0.2  # of cosine, by which a row of the projection must be nearer to another token's row to be misplaced
_ALIKE = 0.05  # largest difference of key norms, in shares of their mean, that drafts hardly notice
_MISPLACED = 0.02  # share of such rows above which d2t is wrong


def check_files(loaded: LoadedDrafter, serving: Serving) -> dict[str, Finding]:
    """The finding of each check that applies to this kind of drafter."""
    findings = {"target": _target(loaded), "chat template": _chat_template(loaded, serving)}
    findings["context length"] = _context_length(loaded, serving)
    if any(True for _ in loaded.drafter.parameters()):
        findings["weights"] = _weights(loaded.drafter)
        findings["dtype"] = _dtype(loaded, serving)
    if isinstance(loaded.drafter, EagleHead):
        findings["rope"] = _rope(loaded)
    if type(loaded.drafter) is DFlash:  # what is built on it, vLLM does not serve on a CPU
        findings["key norms"] = _key_norms(loaded.drafter)
    if isinstance(loaded.drafter, Medusa) and loaded.exported:
        findings["biases"] = _biases(loaded)
    if isinstance(head := loaded.drafter, Eagle3):
        findings |= {"layer numbering": _layer_numbering(loaded), "d2t": _d2t(head, loaded)}
    return findings


def _target(loaded: LoadedDrafter) -> Finding:
    said = dict(loaded.checkpoint or loaded.provenance)
    if not said:
        return note("these files do not say which weights of the target they were trained for")
    try:
        check_target(said, loaded.target)
    except UserError as error:
        return fault(str(error))
    return ok(f"trained for {loaded.target.identity.name} with the same weights")


def _chat_template(loaded: LoadedDrafter, serving: Serving) -> Finding:
    served = template_hash(load_tokenizer(serving.tokenizer) if serving.tokenizer else loaded.target.tokenizer)
    trained = loaded.recorded("target", "chat_template_hash")
    if trained is None and served is None:
        return note(
            "the tokenizer has none, so prompts are plain text: expected one if conversations will be served; add a "
            "chat_template.jinja to the target's directory, or give beginnings of documents with traffic="
        )
    if trained is None:
        return note("not recorded in these files; compare it with the one of the training")
    if trained != served:
        return fault(
            f"served with {f'the template {served}' if served else 'no template'}, trained with {trained}: expected "
            "the same, because the drafter also reads the text around the answers; serve with the tokenizer of the "
            "training, or train with this template"
        )
    if other := other_options(loaded.checkpoint or loaded.provenance, loaded.target):
        return fault(other)
    options = options_of(loaded.target.tokenizer)
    return ok(f"{served}{f' with {in_words(options)}' if options else ''}, as in training")


def _context_length(loaded: LoadedDrafter, serving: Serving) -> Finding:
    wanted = serving.max_model_len or loaded.target.max_length
    held = {**loaded.drafter.config(), **loaded.exported}.get("max_position_embeddings", wanted)
    if held < wanted:
        wrong = f"the drafter's max_position_embeddings is {held}: expected the {wanted} tokens to be served"
        return fault(f"{wrong}, or engines cut or refuse them; set it in config.json or serve less")
    trained = loaded.recorded("data", "sequence_length")
    if trained is not None and serving.max_model_len is not None and trained < serving.max_model_len:
        return note(
            f"trained on sequences of {trained} tokens, served up to {serving.max_model_len}: acceptance falls beyond "
            "the trained length; train with a longer data.sequence_length if such contexts are common"
        )
    return ok(f"{held} positions for {wanted}")


def _rope(loaded: LoadedDrafter) -> Finding:
    ours = dict(loaded.drafter.config()["rope_parameters"])
    expected = shape_of(loaded.target, None)["rope_parameters"]
    if ours != expected:
        wrong = f"the drafter's rotary embedding is {ours} and the target's {expected}: expected the same"
        return fault(f"{wrong}; correct rope_theta and rope_scaling in config.json")
    return ok(f"{ours}, as in the target")


def _layer_numbering(loaded: LoadedDrafter) -> Finding:
    layers = list(loaded.drafter.layers)
    sglang = (loaded.exported.get("eagle_config") or {}).get(LAYERS)
    if loaded.exported.get(LAYERS) and sglang and [k + 1 for k in sglang] != layers:
        wrong = f"config.json says {LAYERS}={layers} to vLLM and {sglang} in eagle_config to SGLang"
        return fault(f"{wrong}: expected {[k - 1 for k in layers]} there, as SGLang counts from 0; export again")
    return ok(f"hidden states after {layers} layers, as every engine counts them")


@torch.no_grad()
def _weights(drafter: Drafter) -> Finding:
    matrices = [name for name, weight in drafter.named_parameters() if weight.ndim == 2]
    broken = [name for name, weight in drafter.named_parameters() if not weight.isfinite().all()]
    mend = "take the weights from a sound checkpoint, or export again"
    if broken:
        return fault(f"{_some(broken)} hold values that are not finite: expected finite weights; {mend}")
    zeros = [name for name in matrices if not drafter.get_parameter(name).any()]
    said = f"of {len(matrices)} weight matrices {len(zeros)} are zero throughout ({_some(zeros)})"
    # Training makes no zeros, but begins with some: in Medusa, DSpark, Kangaroo and others, not in the EAGLE family.
    if zeros and (len(zeros) == len(matrices) or isinstance(drafter, EagleHead)):
        return fault(f"{said}: expected none; {mend}")
    if zeros:
        return note(f"{said}: a drafter that was hardly trained begins so; of a trained one, {mend}")
    return ok(f"{len(matrices)} weight matrices, finite and none of them zero")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@torch.no_grad()
def _key_norms(drafter: DFlash) -> Finding:
    norms = [norm for layer in drafter.decoder_layers if (norm := layer.self_attn.k_norm) is not None]
    weights = torch.stack([norm.weight.float() for norm in norms])  # [layers, d]
    apart = float((weights - weights[0]).abs().max() / weights[0].abs().mean())
    if apart > _ALIKE:
        return note(
            f"the layers' key norms differ by up to {apart:.0%}: vLLM 0.32 on a CPU norms the context keys of every "
            "layer by the first layer's weights, and drafts otherwise than it was trained to; GPUs run another kernel"
        )
    return ok("the layers' key norms are alike, so that every engine computes the same")


@torch.no_grad()
def _biases(loaded: LoadedDrafter) -> Finding:
    held = any(weight.any() for name, weight in loaded.drafter.named_parameters() if name.endswith("bias"))
    if held and not loaded.exported.get("medusa_fc_bias"):
        wrong = "the heads' blocks have biases, which vLLM leaves out where config.json does not name them"
        return fault(f"{wrong}: expected medusa_fc_bias=true; add it, or engines draft otherwise than was trained")
    return ok(f"the blocks have {'biases, as config.json says' if held else 'none'}")


@torch.no_grad()
def _d2t(head: Eagle3, loaded: LoadedDrafter) -> Finding:
    try:
        layout(head, about_target(loaded.target), "float32")
    except UserError as error:
        return fault(str(error))
    if len(head.d2t) == head.vocab_size:
        return ok("the draft vocabulary is the whole vocabulary")
    table, misplaced = normalize(plain(loaded.target.head.weight).float(), dim=-1), 0  # [V, H]
    for rows, ids in zip(head.lm_head.weight.split(1024), head.draft_ids.split(1024), strict=True):
        cosine = normalize(rows.float(), dim=-1) @ table.T  # [n, V]
        own = cosine.gather(1, ids[:, None])[:, 0]
        misplaced += int((cosine.max(dim=-1).values > own + _MARGIN).sum())
    if (share := misplaced / len(head.d2t)) > _MISPLACED:
        wrong = f"{share:.0%} of the rows of lm_head resemble the target's row of another token than d2t names"
        return fault(f"{wrong}: expected d2t and lm_head of one training; take both from one checkpoint")
    return ok(f"{len(head.d2t)} of {head.vocab_size} ids, which fit the rows of lm_head")


def _dtype(loaded: LoadedDrafter, serving: Serving) -> Finding:
    dtype = loaded.served_dtype(serving)
    for name, weight in loaded.drafter.named_parameters():
        if not weight.to(DTYPES[dtype]).isfinite().all():
            return fault(f"{name} is not finite in {dtype}: expected finite weights; serve in bfloat16 or float32")
    return ok(f"every weight is finite in {dtype}")
