"""Measure the embedded target: its held-out loss, and how much of what it writes is repetition.

``python benchmarks/embedded_target.py DIR`` writes both into the model card of what specdraft/embedded/recipe.py
trained. A target that repeats itself makes every drafter look good, so the share of distinct 4-grams stands beside the
loss.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import math
from pathlib import Path

import torch

from specdraft.data.prompts import STDLIB, encode, load_prompts
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.embedded.corpus import LENGTH, documents
from specdraft.evaluation.results import distinct_ngrams
from specdraft.files import write_text
from specdraft.rendering import render
from specdraft.targets import Target

PROMPTS, NEW_TOKENS = 40, 128


@torch.inference_mode()
def held_out_loss(target: Target, docs: list[list[int]], limit: int = 200) -> float:
    """Mean negative log likelihood (nats per token) of the beginnings of up to ``limit`` documents."""
    total, count = 0.0, 0
    for ids in (ids[:LENGTH] for ids in docs[:limit] if len(ids) > 1):
        tokens = torch.tensor(ids)
        features = target.features(tokens[None], torch.arange(len(ids))[None], ())
        logits = target.logits(features.last[0, :-1]).float()
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count


def distinctness(target: Target, temperature: float) -> float:
    """Share of distinct 4-grams in answers of at most ``NEW_TOKENS`` tokens to held-out function prompts."""
    prompts = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts(STDLIB, PROMPTS)]
    answers = Decoder(target, sampling=Sampling(temperature)).generate_batch(prompts, NEW_TOKENS, batch_size=8)
    return distinct_ngrams([answer.tokens for answer in answers], 4)


def write_card(directory: Path, steps: int | None = None) -> None:
    """Measure the target in ``directory`` and write its ``README.md``. ``steps``: how long it was trained."""
    target = Target.load(str(directory), dtype="float32", device="cpu", packed=False)
    held_out = documents(target.tokenizer, "validation")
    card = render(
        "embedded/card.md.jinja",
        target=target,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        steps=steps,
        losses={kind: held_out_loss(target, docs) for kind, docs in held_out.items() if docs},
        exp=math.exp,
        distinct={temperature: distinctness(target, temperature) for temperature in (0.0, 0.8, 1.0)},
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
    )
    write_text(directory / "README.md", card)
    print(card)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a from_pretrained directory")
    parser.add_argument("--steps", type=int, help="optimizer steps that it was trained for, to be noted")
    arguments = parser.parse_args()
    write_card(arguments.directory, arguments.steps)
