"""Exported MTP layers, by the names that a target of their kind has."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdraft.drafters.eagle import MTP
from specdraft.errors import UserError
from specdraft.export.importing.shared import check_sizes, drop_borrowed, refuse_layers
from specdraft.targets import Target


def read_mtp(
    config: Mapping[str, Any], files: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> MTP:
    """The layer of these files, weights in fp32, bound to ``target``. It has the shape of a layer of ``target``, and
    reads the hidden state that engines hand it there. Raises UserError for files of another target or layout, and for
    ``layers``."""
    refuse_layers(layers, "an MTP layer reads")
    check_sizes(target, config, ("hidden_size", "vocab_size"), "an MTP layer")
    layer = MTP.for_target(target, start="scratch")
    said = (config.get("architectures") or ["nothing"])[0]
    if said != layer.layout.architecture:
        wrong = f"the MTP layer is {said}'s, and engines run {layer.layout.architecture}'s for this target"
        raise UserError(f"{wrong}: expected a layer of this target; name its own target")
    tensors = dict(files)
    drop_borrowed(target, tensors, "an MTP layer", "model.")
    layer.take(tensors, target.num_layers, "the files")
    return layer.eval()
