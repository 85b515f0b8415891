"""Published ReDrafters, with every number that the package ``recurrent_drafting`` computes with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.export.importing.shared import check_sizes, refuse_layers
from specdraft.export.layout import check_tensors
from specdraft.export.redrafter import published_name, tensor_shapes
from specdraft.targets import Target
from specdraft.targets.sizes import at_most

_SIZES = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers")
_SPARE = 64  # weights that a constructor makes and drops


def read_redrafter(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> ReDrafter:
    """The drafter of these files, weights in fp32, bound to ``target``. Raises UserError for files of another target,
    or of a drafter without a recurrence, and for ``layers``, as it reads none."""
    refuse_layers(layers, "a ReDrafter reads")
    for key in _SIZES:
        if type(config.get(key)) is not int or config[key] < 1:
            wrong = f"the drafter's {key} is {config.get(key)!r}"
            raise UserError(f"{wrong}: expected a positive number; download its config.json again")
    check_sizes(target, config, ("hidden_size", "vocab_size"), "a drafter")
    if config.get("rnn") is not True:
        wrong = f"the drafter has rnn={str(config.get('rnn')).lower()}, a sum of embeddings and no recurrence"
        raise UserError(f"{wrong}: expected rnn=true, as in the paper; train a ReDrafter of your own")
    width, num_layers = config["exit_dim"], config["num_draft_layers"]
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    check_tensors("a ReDrafter", floats, tensor_shapes(config), "float32")
    arguments = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "exit_size": None if width == 2 * target.hidden_size else width,
        "num_layers": num_layers,
    }
    with torch.device("meta"), at_most(_SPARE + 4 * len(tensors), "config.json"):
        names = list(ReDrafter(**arguments).state_dict())
    drafter = ReDrafter(**arguments)
    drafter.load_state_dict({name: floats[published_name(name, num_layers)] for name in names})
    drafter.bind(target)
    return drafter.eval()
