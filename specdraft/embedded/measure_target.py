"""What the embedded target is worth: held-out loss, and whether it says different things or loops.

    python -m specdraft.embedded.measure_target DIR

A target that loops makes every drafter look good. So the share of distinct 4-grams in what it generates stands in its
model card, beside the loss.
"""

import argparse
from pathlib import Path

import torch

from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.embedded.corpus import LENGTH, documents
from specdraft.evaluation.results import distinct_ngrams
from specdraft.files import atomic_file
from specdraft.targets import Target

PROMPTS, NEW_TOKENS = 40, 128


@torch.inference_mode()
def held_out_loss(target: Target, docs: list[list[int]], limit: int = 200) -> float:
    """Mean negative log likelihood (nats per token) of the first ``LENGTH`` tokens of up to ``limit`` documents."""
    total, count = 0.0, 0
    for ids in (ids[:LENGTH] for ids in docs[:limit] if len(ids) > 1):
        tokens = torch.tensor(ids)
        features = target.features(tokens[None], torch.arange(len(ids))[None], ())
        logits = target.logits(features.last[0, :-1]).float()
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count


def distinctness(target: Target, temperature: float) -> float:
    """Share of distinct 4-grams in answers of 128 tokens at most to held-out function prompts."""
    decoder = Decoder(target, sampling=Sampling(temperature))
    answers = []
    for index, conversation in enumerate(PythonStdlib().prompts("test", PROMPTS)):
        ids = target.tokenizer.apply_chat_template(
            [dict(message) for message in conversation.prompt_messages], add_generation_prompt=True, return_dict=False
        )
        answers.append(decoder.generate(ids, NEW_TOKENS, seed=index).tokens)
    return distinct_ngrams(answers, 4)


def write_card(directory: Path, steps: int | None = None) -> None:
    """Measure the target in ``directory`` and write its ``README.md``."""
    target = Target.load(str(directory), dtype="float32", device="cpu")
    held_out = documents(target.tokenizer, "validation")
    losses = {kind: held_out_loss(target, docs) for kind, docs in held_out.items() if docs}
    distinct = {temperature: distinctness(target, temperature) for temperature in (0.0, 0.8, 1.0)}
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    lines = [
        "# The embedded target",
        "",
        f"A Llama-architecture language model of {parameters / 1e6:.1f}M parameters ({target.num_layers} layers of "
        f"width {target.hidden_size}, {target.vocab_size:,} tokens), trained by `python -m specdraft.embedded.recipe`"
        + (f" for {steps:,} steps of 8,192 tokens" if steps else "")
        + " on Python's own standard library. It exists so that drafters can be trained, decoded with and served "
        "anywhere, within minutes; it writes plausible Python, not correct programs.",
        "",
        "| held-out text (validation split, files never trained on) | nats per token | perplexity |",
        "|---|---|---|",
        *(f"| {kind} | {loss:.3f} | {torch.tensor(loss).exp():.1f} |" for kind, loss in losses.items()),
        "",
        f"| {PROMPTS} held-out function prompts, {NEW_TOKENS} tokens | distinct 4-grams |",
        "|---|---|",
        *(f"| temperature {temperature:g} | {share:.0%} |" for temperature, share in distinct.items()),
        "",
        "The library is the Python Software Foundation's, under the PSF License Agreement.",
    ]
    with atomic_file(directory / "README.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a from_pretrained directory")
    parser.add_argument("--steps", type=int, help="optimizer steps that it was trained for, to be noted")
    arguments = parser.parse_args()
    write_card(arguments.directory, arguments.steps)
