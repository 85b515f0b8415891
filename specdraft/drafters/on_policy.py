"""On-policy distillation: answers that go on in the draft's own words (2310.08461, section 4; GKD, 2306.13649).

D = documents whose answer is replaced, T = tokens in a sequence, H = hidden size.

A draft that learns from the target's text alone never sees what follows its own mistakes. Here a share of the
documents keeps the target's answer up to a random token and goes on with what the draft samples; the target's
distribution is the teacher on that text as on any other."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.decoding.passes import Pass
from specdraft.decoding.sampling import sample
from specdraft.targets import LanguageModel
from specdraft.targets.batch import Batch


class Span(NamedTuple):
    """Places in a sequence: the document begins at ``begin``, and ``start`` up to ``end`` is to be replaced."""

    sequence: int
    begin: int
    start: int
    end: int


@torch.no_grad()
def continue_answers(
    batch: Batch, model: LanguageModel, share: float, ends: frozenset[int], generator: torch.Generator
) -> Batch:
    """The batch with the answers of a ``share`` of its documents continued by ``model`` at temperature 1. Lengths,
    positions and documents stay. After a sampled end of text (one of ``ends``) the answer keeps its old tokens, and
    there is nothing left to learn."""
    spans = choose(batch, share, generator)
    if not spans:
        return batch
    with torch.inference_mode():
        sampled = _continue(batch.input_ids, spans, model, generator).tolist()
    # Training would go on with weights that autocast has cast here, without their gradients.
    torch.clear_autocast_cache()
    ids, mask = batch.input_ids.clone(), batch.loss_mask.clone()
    for span, tokens in zip(spans, sampled, strict=True):
        tokens = tokens[: span.end - span.start]
        length = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
        ids[span.sequence, span.start : span.start + length] = torch.tensor(tokens[:length], device=ids.device)
        mask[span.sequence, span.start + length : span.end] = False
    return replace(batch, input_ids=ids, loss_mask=mask)


def choose(batch: Batch, share: float, generator: torch.Generator) -> list[Span]:
    """Each document with probability ``share``: from one of its supervised tokens to the end of that answer. All
    supervised tokens of a document are equally likely, but for its first: nothing comes before that."""
    spans = []
    both = zip(batch.document_ids.tolist(), batch.loss_mask.tolist(), strict=True)
    for sequence, (documents, mask) in enumerate(both):
        begins = [t for t in range(len(documents)) if t == 0 or documents[t] != documents[t - 1]]
        for begin, after in zip(begins, [*begins[1:], len(documents)], strict=True):
            learned = [t for t in range(begin + 1, after) if mask[t]]
            if documents[begin] < 0 or not learned or _uniform(generator) >= share:
                continue
            start = learned[int(_uniform(generator) * len(learned))]
            end = next((t for t in range(start, after) if not mask[t]), after)
            spans.append(Span(sequence, begin, start, end))
    return spans


def _uniform(generator: torch.Generator) -> float:
    # In fp64, whose largest value below 1 stays below any count it is multiplied with.
    return torch.rand((), generator=generator, dtype=torch.float64, device=generator.device).item()


def _continue(ids: Tensor, spans: list[Span], model: LanguageModel, generator: torch.Generator) -> Tensor:
    """Tokens ``[D, longest span]``, sampled side by side; each goes on after its span's end until all are done."""
    held = [span.start - span.begin for span in spans]
    lengths, longest = torch.tensor(held, device=ids.device), max(held)
    prefixes = pad_sequence([ids[span.sequence, span.begin : span.start] for span in spans], batch_first=True)
    steps = max(span.end - span.start for span in spans)
    cache = model.new_cache(len(spans), longest + steps)
    reading = Pass.text(prefixes, torch.zeros_like(lengths), 0)  # the padding of a short prefix comes after it, unseen
    last = model.step(reading, cache).take(lengths[:, None] - 1).last[:, 0]  # [D, H]
    tokens: list[Tensor] = []
    for step in range(steps):
        p = model.logits(last).float().softmax(-1)
        tokens.append(sample(p, torch.rand(len(p), generator=generator, device=p.device, dtype=torch.float64)))
        if step < steps - 1:
            reading = Pass.text(tokens[-1][:, None], lengths + step, longest + step)
            last = model.step(reading, cache).last[:, 0]
    return torch.stack(tokens, dim=1)
