"""The ReDrafter layout, as published: that of the package ``recurrent_drafting``, which TensorRT-LLM read as well.

H = hidden size, E = width of the exit, V = vocabulary, N = residual layers.

- ``rnn_w.weight``, ``rnn_u.{weight,bias}``; ``lm_head.{i}.linear.{weight,bias}`` of residual layer i and
  ``lm_head.{N}.weight [V, E]``; where E is not 2H ``input_proj.{weight,bias}``.
- The cell reads embeddings as they are: what ours multiplies them by, a power of two, is multiplied into ``rnn_w``,
  which changes no digit of any product.
- There is no place for a draft vocabulary, and rows of zeros would be drafted wherever all true logits are negative. So
  the vocabulary has to be the whole one."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.layout import Layout, cast, check_positive, check_tensors

MODEL_TYPE = "recurrent_drafting_drafter"
CELL = "rnn_w.weight"  # what reads the embedding


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of a ``ReDrafter``. ``target``: what the checkpoint says of it. Raises UserError for unsound weights
    and for a pruned vocabulary."""
    options = drafter.config()
    vocabulary, hidden = int(options["vocab_size"]), int(options["hidden_size"])
    if options["draft_vocab_size"] != vocabulary:
        wrong = f"the ReDrafter has a draft vocabulary of {options['draft_vocab_size']} of {vocabulary} tokens"
        raise UserError(f"{wrong}, which its layout has no place for: expected all; set model.draft_vocab_size=null")
    config: dict[str, Any] = {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "exit_dim": 2 * hidden if options["exit_size"] is None else int(options["exit_size"]),
        "num_draft_layers": int(options["num_layers"]),
        "num_lookback_tokens": -1,  # of an earlier drafter that had no recurrence
        "rnn": True,
        "torch_dtype": dtype,
    }
    check_positive(config, ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers"))
    layers = config["num_draft_layers"]
    state = {published_name(name, layers): tensor for name, tensor in drafter.state_dict().items()}
    if CELL in state:
        state[CELL] = state[CELL] * float(options["embedding_scale"])
    tensors = cast(state, dtype)
    check_tensors("a ReDrafter", tensors, tensor_shapes(config), dtype)
    facts = {"exit": f"{config['exit_dim']} wide, with {layers} residual layer{'s' if layers > 1 else ''}"}
    facts["trained for"] = f"drafts of {options['ttt_steps']} tokens; a longer one is drafted by the same recurrence"
    return Layout("redrafter", config, tensors, dtype, facts=facts)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the file."""
    hidden, width, layers = config["hidden_size"], config["exit_dim"], config["num_draft_layers"]
    shapes: dict[str, tuple[int, ...]] = {
        CELL: (hidden, hidden),
        "rnn_u.weight": (hidden, hidden),
        "rnn_u.bias": (hidden,),
        f"lm_head.{layers}.weight": (config["vocab_size"], width),
    }
    if width != 2 * hidden:
        shapes |= {"input_proj.weight": (width, 2 * hidden), "input_proj.bias": (width,)}
    for layer in range(layers):
        linear = f"lm_head.{layer}.linear"
        shapes |= {f"{linear}.weight": (width, width), f"{linear}.bias": (width,)}
    return shapes


def published_name(name: str, layers: int) -> str:
    """The published name of a parameter of ours; most have one name."""
    match name.split("."):
        case ["block", "layers", layer, kind]:
            return f"lm_head.{layer}.linear.{kind}"
        case ["lm_head", "weight"]:
            return f"lm_head.{layers}.weight"
    return name
