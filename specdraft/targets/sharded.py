"""A target too large for one device: its decoder layers are sharded over the ranks, by a ZeRO-3 engine of its own.

Embedding, final norm and head stay whole on every rank: the loss reads the head once per chunk of positions, of which
ranks have different numbers, so that gathering it there would wait for ever. Layers run once per batch on every rank.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from specdraft.errors import UserError


def gathered(parameters: Iterable[nn.Parameter], written: bool = False) -> AbstractContextManager[Any]:
    """While it lasts, sharded ones are whole on every rank; ``written``: what rank 0 writes into them is kept. Every
    rank must come here."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if written else None)


def load_partitioned(load: Callable[[], tuple[Any, Any]], dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The model and tokenizer that ``load`` makes with ``from_pretrained``, and the engine that runs the layers. No
    rank ever holds the whole: each weight is sharded as it is made, and filled as it is read. Raises UserError unless
    the ranks are there already."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        found = f"target.placement=zero3 shards the target over ranks, but {missing[0]} is not set"
        wanted = "ranks that are there before it is loaded; start them with torchrun --nproc_per_node=N train.py ..."
        raise UserError(f"{found}: expected {wanted}")
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
    }
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    alive = HfDeepSpeedConfig(config)  # from_pretrained shards weights as long as there is one
    model, tokenizer = load()
    del alive
    model.requires_grad_(False).eval()
    layers = model.get_decoder().layers
    _make_whole(model, but=layers)
    engine, *_ = deepspeed.initialize(model=layers, config=config)
    # A pass begins with the decoder, and not with the list of its layers, which the engine waits for.
    model.get_decoder().register_forward_pre_hook(lambda *_: engine.optimizer.get_param_coordinator().reset_step())
    return model, tokenizer, engine


def _make_whole(model: nn.Module, but: nn.Module) -> None:
    inside = set(but.modules())
    whole: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in (each for each in model.modules() if each not in inside):
        for name, parameter in list(module.named_parameters(recurse=False)):
            number = parameter.ds_id  # type: ignore[attr-defined]
            if number not in whole:
                with gathered([parameter]):
                    whole[number] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(module, name, whole[number])
