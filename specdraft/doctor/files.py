"""Checks of what is written down: nothing is computed with the target."""

from collections.abc import Iterator

import torch

from specdraft.doctor.findings import Finding, fault, note, ok
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


def check_files(loaded: LoadedDrafter, serving: Serving, served_template: str | None) -> Iterator[Finding]:
    """A finding per check that applies. ``served_template``: hash of the chat template that will be served with."""
    yield _identity(loaded)
    yield _template(loaded, served_template)
    yield _context(loaded, serving)
    if isinstance(loaded.drafter, EagleHead):
        yield _rope(loaded)
    if isinstance(loaded.drafter, Eagle3):
        yield _numbering(loaded)
        yield _vocabulary(loaded.drafter, loaded)
        yield _dtype(loaded.drafter, loaded, serving)


def _identity(loaded: LoadedDrafter) -> Finding:
    if not loaded.recorded:
        return note("target", "these files do not say which weights of the target they were trained for")
    try:
        check_target(dict(loaded.recorded), loaded.target)
    except UserError as error:
        return fault("target", str(error))
    return ok("target", f"trained for {loaded.target.identity.name}, these very weights")


def _template(loaded: LoadedDrafter, served: str | None) -> Finding:
    trained = loaded.recorded.get("extra", {}).get("target", {}).get("chat_template_hash")
    if trained is None and served is None:
        return note(
            "chat template",
            "the tokenizer has none, so that prompts are plain text: expected one if conversations will be served; add "
            "a chat_template.jinja to the target's directory, or give documents' beginnings with traffic=",
        )
    if trained is None:
        return note("chat template", "not recorded with these files; compare it with the training's")
    if trained != served:
        serving = f"the template {served}" if served else "no template"
        return fault(
            "chat template",
            f"served with {serving}, trained with {trained}: expected the same, because the drafter knows "
            "the text around the answers too; serve with the training's tokenizer, or train with this template",
        )
    return ok("chat template", f"{served}, as in training")


def _context(loaded: LoadedDrafter, serving: Serving) -> Finding:
    wanted = serving.max_model_len or loaded.target.max_length
    described = {**loaded.drafter.config(), **loaded.served}
    held = described.get("max_position_embeddings", wanted)
    if held < wanted:
        return fault(
            "context length",
            f"the drafter's max_position_embeddings is {held} and {wanted} are to be served: expected at least as "
            "many; engines cut or refuse beyond it, so set it in config.json or serve shorter contexts",
        )
    trained = loaded.training("sequence_length")
    if trained is not None and serving.max_model_len is not None and trained < serving.max_model_len:
        return note(
            "context length",
            f"trained on rows of {trained} tokens, served up to {serving.max_model_len}: acceptance falls beyond what "
            "was trained; train with a longer data.sequence_length if such contexts are common",
        )
    return ok("context length", f"{held} positions for {wanted}")


def _rope(loaded: LoadedDrafter) -> Finding:
    ours = dict(loaded.drafter.config()["rope_parameters"])
    own = shape_of(loaded.target, None)["rope_parameters"]
    if ours != own:
        return fault(
            "rope",
            f"the drafter's rotary embedding is {ours} and the target's {own}: expected the target's, with which heads "
            "are built; correct rope_theta and rope_scaling in config.json",
        )
    return ok("rope", f"{ours}, the target's own")


def _numbering(loaded: LoadedDrafter) -> Finding:
    layers = list(loaded.drafter.layers)
    theirs = (loaded.served.get("eagle_config") or {}).get(_KEY)
    if loaded.served.get(_KEY) and theirs and [k + 1 for k in theirs] != layers:
        return fault(
            "layer numbering",
            f"config.json says {_KEY}={layers} to vLLM and {theirs} in eagle_config to SGLang: expected "
            f"{[k - 1 for k in layers]} there, since SGLang counts from the layer's own number; export again",
        )
    return ok("layer numbering", f"hidden states after {layers} layers, in every engine's way of counting")


def _vocabulary(head: Eagle3, loaded: LoadedDrafter) -> Finding:
    """d2t is sound, and its ids are those whose rows the projection grew from."""
    try:
        layout(head.float(), about_target(loaded.target), "float32")
    except UserError as error:
        return fault("d2t", str(error))
    finally:
        head.to(loaded.target.dtype)
    if len(head.d2t) == head.vocab_size:
        return ok("d2t", "the draft vocabulary is the whole vocabulary")
    stray = _stray_rows(head, loaded)
    if stray > _STRAY_ROWS:
        return fault(
            "d2t",
            f"{stray:.0%} of the projection's rows resemble another token's row of the target than the one that d2t "
            "names: expected d2t and lm_head of one training; take both from the same checkpoint",
        )
    return ok("d2t", f"{len(head.d2t)} of {head.vocab_size} ids, in agreement with the projection's rows")


@torch.no_grad()
def _stray_rows(head: Eagle3, loaded: LoadedDrafter) -> float:
    """Share of the rows that are clearly nearer to another token's row of the target's head than to their own's."""
    table = torch.nn.functional.normalize(loaded.target.head.weight.float(), dim=-1)  # [V, H]
    stray = 0
    for rows, ids in zip(head.lm_head.weight.split(1024), head.draft_ids.split(1024), strict=True):
        near = torch.nn.functional.normalize(rows.float(), dim=-1) @ table.T  # [n, V]
        own = near.gather(1, ids[:, None])[:, 0]
        stray += int((near.max(dim=-1).values > own + _CLOSER).sum())
    return stray / len(head.draft_ids)


def _dtype(head: Eagle3, loaded: LoadedDrafter, serving: Serving) -> Finding:
    wanted = served_dtype(loaded, serving)
    lost = [name for name, weight in head.named_parameters() if not bool(weight.to(DTYPES[wanted]).isfinite().all())]
    if lost:
        return fault(
            "dtype",
            f"{lost[0]} is not finite in {wanted}: expected weights that the serving dtype can hold; serve in bfloat16 "
            "or float32",
        )
    return ok("dtype", f"every weight is finite in {wanted}")
