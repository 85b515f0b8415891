"""Rebuild the embedded target from the interpreter's own standard library.

    python -m specdraft.embedded.recipe --out DIR [--steps 1020] [--compile]

Two stages on the files of the training split: first source files, test suites and chat examples together,
then mostly chat examples while the learning rate falls. Interrupted runs continue where they were."""

import argparse
import copy
import math
import random
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdraft.data.sources import stdlib
from specdraft.embedded.corpus import LENGTH, documents, sequences
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.files import atomic_directory, atomic_file
from specdraft.training.schedule import OptimizerSettings

VOCAB, CONTEXT = 4096, 1024
BATCH = 16  # sequences: 8,192 tokens a step
PEAK_LR, WARMUP, STABLE = 2e-3, 60, 0.65  # the first 65 % of the steps at the peak, then linear decay


def config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Deep and narrow, so that a one-layer head costs little beside it: 16 layers of width 256, 11.3M parameters."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, a plateau, linear decay to 2 % of the peak."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    left = (steps - step) / max(1, steps - int(steps * STABLE))
    return PEAK_LR * min(1.0, max(0.02, left))


def train(out: Path, steps: int, compile_model: bool, seed: int = 0) -> None:
    """Train and write ``out``, a ``from_pretrained`` directory in bf16, and beside it ``state.pt`` for resuming."""
    torch.manual_seed(seed)
    sources = (stdlib.read(p) for p in stdlib.files() if stdlib.split_of(p) == "train" and not stdlib.is_test(p))
    tokenizer = train_tokenizer(sources, VOCAB, CONTEXT)
    kinds = documents(tokenizer, "train")
    rng = random.Random(seed)
    mixed = sequences(kinds, {"library": 1.5, "tests": 0.5, "chat": 1.5}, rng)
    final = sequences(kinds, {"library": 0.5, "chat": 3.0}, rng)
    print({kind: sum(map(len, docs)) for kind, docs in kinds.items()}, len(mixed) // BATCH, len(final) // BATCH)

    model = LlamaForCausalLM(config(tokenizer))
    for name, parameter in model.named_parameters():  # residual branches start small in a deep model
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data /= math.sqrt(2 * model.config.num_hidden_layers)
    optimizer = OptimizerSettings(PEAK_LR, weight_decay=0.1).build(model)  # AdamW, betas 0.9 and 0.95
    state_path, first = out.parent / "state.pt", 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    forward = torch.compile(model.model) if compile_model else model.model
    decay_from = int(steps * STABLE)
    bar = tqdm(range(first, steps), initial=first, total=steps, unit="token", unit_scale=BATCH * LENGTH)
    for step in bar:
        stage, offset = (mixed, step) if step < decay_from else (final, step - decay_from)
        batch = torch.tensor([stage[(offset * BATCH + i) % len(stage)] for i in range(BATCH)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(forward(batch, use_cache=False).last_hidden_state)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % 100 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            with atomic_file(state_path) as temporary:
                torch.save(state, temporary)
            with atomic_directory(out) as temporary:
                copy.deepcopy(model).bfloat16().save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
    print(f"python benchmarks/embedded_target.py {out} --steps {steps} measures it and writes its model card")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=1020, help="optimizer steps of 8,192 tokens")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (1.5x on a CPU)")
    arguments = parser.parse_args()
    train(arguments.out, arguments.steps, arguments.compile)
