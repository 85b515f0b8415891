"""Checks of what is written down: nothing is computed with the target."""

from collections.abc import Iterator

import torch

from specdraft.doctor.findings import Finding, Level
from specdraft.doctor.loaded_drafter import LoadedDrafter, Serving, served_dtype
from specdraft.drafters.checkpoint import about_target, check_target
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.eagle.head import EagleHead, shape_of
from specdraft.errors import UserError
from specdraft.export.eagle3 import layout
from specdraft.export.layout import DTYPES

_KEY = "eagle_aux_hidden_state_layer_ids"
_CLOSER = 0.2  # cosine by which another token's row must be nearer than a row's own
_STRAY_ROWS = 0.02


def examine_files(patient: LoadedDrafter, serving: Serving, served_template: str | None) -> Iterator[Finding]:
    """A finding per check that applies. ``served_template``: hash of the chat template that will be served with."""
    yield _identity(patient)
    yield _template(patient, served_template)
    yield _context(patient, serving)
    if isinstance(patient.drafter, EagleHead):
        yield _rope(patient)
    if isinstance(patient.drafter, Eagle3):
        yield _numbering(patient)
        yield _vocabulary(patient.drafter, patient)
        yield _dtype(patient.drafter, patient, serving)


def _identity(patient: LoadedDrafter) -> Finding:
    if not patient.recorded:
        return Finding("target", Level.NOTE, "these files do not say which weights of the target they were trained for")
    try:
        check_target(dict(patient.recorded), patient.target)
    except UserError as error:
        return Finding("target", Level.FAULT, str(error))
    return Finding("target", Level.OK, f"trained for {patient.target.identity.name}, these very weights")


def _template(patient: LoadedDrafter, served: str | None) -> Finding:
    trained = patient.recorded.get("extra", {}).get("target", {}).get("chat_template_hash")
    if trained is None and served is None:
        return Finding(
            "chat template",
            Level.NOTE,
            "the tokenizer has none, so that prompts are plain text: expected one if conversations will be served; add "
            "a chat_template.jinja to the target's directory, or give documents' beginnings with traffic=",
        )
    if trained is None:
        return Finding("chat template", Level.NOTE, "not recorded with these files; compare it with the training's")
    if trained != served:
        serving = f"the template {served}" if served else "no template"
        return Finding(
            "chat template",
            Level.FAULT,
            f"served with {serving}, trained with {trained}: expected the same, because the drafter knows "
            "the text around the answers too; serve with the training's tokenizer, or train with this template",
        )
    return Finding("chat template", Level.OK, f"{served}, as in training")


def _context(patient: LoadedDrafter, serving: Serving) -> Finding:
    wanted = serving.max_model_len or patient.target.max_length
    described = {**patient.drafter.config(), **patient.served}
    held = described.get("max_position_embeddings", wanted)
    if held < wanted:
        return Finding(
            "context length",
            Level.FAULT,
            f"the drafter's max_position_embeddings is {held} and {wanted} are to be served: expected at least as "
            "many; engines cut or refuse beyond it, so set it in config.json or serve shorter contexts",
        )
    trained = patient.training("sequence_length")
    if trained is not None and serving.max_model_len is not None and trained < serving.max_model_len:
        return Finding(
            "context length",
            Level.NOTE,
            f"trained on rows of {trained} tokens, served up to {serving.max_model_len}: acceptance falls beyond what "
            "was trained; train with a longer data.sequence_length if such contexts are common",
        )
    return Finding("context length", Level.OK, f"{held} positions for {wanted}")


def _rope(patient: LoadedDrafter) -> Finding:
    ours = dict(patient.drafter.config()["rope_parameters"])
    own = shape_of(patient.target, None)["rope_parameters"]
    if ours != own:
        return Finding(
            "rope",
            Level.FAULT,
            f"the drafter's rotary embedding is {ours} and the target's {own}: expected the target's, with which heads "
            "are built; correct rope_theta and rope_scaling in config.json",
        )
    return Finding("rope", Level.OK, f"{ours}, the target's own")


def _numbering(patient: LoadedDrafter) -> Finding:
    layers = list(patient.drafter.layers)
    theirs = (patient.served.get("eagle_config") or {}).get(_KEY)
    if patient.served.get(_KEY) and theirs and [k + 1 for k in theirs] != layers:
        return Finding(
            "layer numbering",
            Level.FAULT,
            f"config.json says {_KEY}={layers} to vLLM and {theirs} in eagle_config to SGLang: expected "
            f"{[k - 1 for k in layers]} there, since SGLang counts from the layer's own number; export again",
        )
    return Finding(
        "layer numbering", Level.OK, f"hidden states after {layers} layers, in every engine's way of counting"
    )


def _vocabulary(head: Eagle3, patient: LoadedDrafter) -> Finding:
    """d2t is sound, and its ids are those whose rows the projection grew from."""
    try:
        layout(head.float(), about_target(patient.target), "float32")
    except UserError as error:
        return Finding("d2t", Level.FAULT, str(error))
    finally:
        head.to(patient.target.dtype)
    if len(head.d2t) == head.vocab_size:
        return Finding("d2t", Level.OK, "the draft vocabulary is the whole vocabulary")
    stray = _stray_rows(head, patient)
    if stray > _STRAY_ROWS:
        return Finding(
            "d2t",
            Level.FAULT,
            f"{stray:.0%} of the projection's rows resemble another token's row of the target than the one that d2t "
            "names: expected d2t and lm_head of one training; take both from the same checkpoint",
        )
    return Finding(
        "d2t", Level.OK, f"{len(head.d2t)} of {head.vocab_size} ids, in agreement with the projection's rows"
    )


@torch.no_grad()
def _stray_rows(head: Eagle3, patient: LoadedDrafter) -> float:
    """Share of the rows that are clearly nearer to another token's row of the target's head than to their own's."""
    table = torch.nn.functional.normalize(patient.target.head.weight.float(), dim=-1)  # [V, H]
    stray = 0
    for rows, ids in zip(head.lm_head.weight.split(1024), head.draft_ids.split(1024), strict=True):
        near = torch.nn.functional.normalize(rows.float(), dim=-1) @ table.T  # [n, V]
        own = near.gather(1, ids[:, None])[:, 0]
        stray += int((near.max(dim=-1).values > own + _CLOSER).sum())
    return stray / len(head.draft_ids)


def _dtype(head: Eagle3, patient: LoadedDrafter, serving: Serving) -> Finding:
    wanted = served_dtype(patient, serving)
    lost = [name for name, weight in head.named_parameters() if not bool(weight.to(DTYPES[wanted]).isfinite().all())]
    if lost:
        return Finding(
            "dtype",
            Level.FAULT,
            f"{lost[0]} is not finite in {wanted}: expected weights that the serving dtype can hold; serve in bfloat16 "
            "or float32",
        )
    return Finding("dtype", Level.OK, f"every weight is finite in {wanted}")
