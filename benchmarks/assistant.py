"""A draft model for transformers' assisted generation: the target's own first layer, distilled as long as the head was.

One layer with the target's tied embedding has about as many parameters as an EAGLE-3 head. It sees the same packed
batches of the target's own answers, for the same number of steps at the same learning rate.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.nn.functional import kl_div
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from specdraft.drafters.batch import Batch
from specdraft.files import atomic_directory
from specdraft.targets import Target

LEARNING_RATE = 1e-3
WARM_UP = 0.05


def one_layer(target: Target) -> Any:
    """A model of the target's class with its embedding, first layer, final norm and head."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = type(target.model)(config).to(target.device, target.dtype)
    model.load_state_dict(target.model.state_dict(), strict=False)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return model


def distil(target: Target, steps: int) -> Any:
    """Train it on the default data with forward KL to the target at every supervised token."""
    with initialize_config_dir(str(Path(__file__).resolve().parents[1] / "conf"), version_base=None):
        data = instantiate(compose("train").data)
    data.prepare(target)
    model = one_layer(target).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=WARM_UP)
    epochs = (batch for _ in itertools.count() for batch in data.train_dataloader())
    for batch in tqdm(itertools.islice(epochs, steps), total=steps, desc="distils the one-layer draft"):
        loss = divergence(model, target, batch.to(target.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def divergence(model: Any, target: Target, batch: Batch) -> torch.Tensor:
    """Mean KL of the rows whose next token is to be learnt."""
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    rows = batch.loss_mask[:, 1:] & same
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    with torch.no_grad():
        last = target.features(**inputs, layers=()).last
        log_p = target.logits(last[:, :-1][rows]).log_softmax(-1)
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
    log_q = model.get_output_embeddings()(hidden[:, :-1][rows]).log_softmax(-1)
    return kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def obtain(target: Target, steps: int, directory: Path) -> Any:
    """The draft model, from ``directory`` if it was made before."""
    if not (directory / "config.json").is_file():
        model = distil(target, steps)
        with atomic_directory(directory) as temporary:
            model.save_pretrained(temporary)
    return AutoModelForCausalLM.from_pretrained(directory).to(target.device, target.dtype).eval()
