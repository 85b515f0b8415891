"""The traffic decoded with the drafter as it is now: what was accepted of every request, and the worst of them as data.

P = prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.data.prompts import Prompt, encode
from specdraft.data.sources.conversations import Conversations
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape
from specdraft.doctor.checks import LoadedDrafter
from specdraft.errors import UserError
from specdraft.evaluation.bootstrap import Interval, bootstrap_interval
from specdraft.files import write_text

_BATCH = 8  # prompts decoded side by side
_HELD_OUT = (0.05, 0.1, 0.2, 0.3, 0.4)  # shares of questions for validation, the usual one first


@dataclass(frozen=True)
class Measured:
    """One request: its prompt and its answer in tokens and words, and what was accepted."""

    prompt: Prompt
    prompt_tokens: int
    answer_tokens: int
    answer: str
    counts: AcceptanceCounts


def measure(
    loaded: LoadedDrafter,
    prompts: Sequence[Prompt],
    shape: Shape | int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    system_prompt: str | None = None,
) -> list[Measured]:
    """Decode the first turn of every prompt that leaves room for it, with drafts of ``shape``, a number a
    chain of as many tokens. Raises UserError if none does."""
    target = loaded.target
    before = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asking = [(prompt, encode(target.tokenizer, [*before, *prompt.opening])) for prompt in prompts]
    asking = [(prompt, ids) for prompt, ids in asking if len(ids) + max_new_tokens <= target.max_length]
    if not asking:
        said = f"none of the {len(prompts)} prompts leaves room for {max_new_tokens} tokens, which the report decoded"
        raise UserError(f"{said}: give shorter prompts with traffic=")
    decoder = Decoder(target, loaded.drafter, shape, sampling)
    found = []
    generations = decoder.generate_batch([ids for _, ids in asking], max_new_tokens, _BATCH)
    for (prompt, asked), generation in zip(asking, generations, strict=True):
        counts = AcceptanceCounts(decoder.num_draft_tokens).add(generation)
        words = answer_in_words(target.tokenizer, generation.tokens)
        found.append(Measured(prompt, len(asked), len(generation.tokens), words, counts))
    return found


def total(requests: Sequence[Measured]) -> AcceptanceCounts:
    """The counts of all requests."""
    return sum((each.counts for each in requests[1:]), requests[0].counts)


def length_interval(requests: Sequence[Measured]) -> Interval | None:
    """Of the acceptance length, 95 %, by a bootstrap over prompts; None where it is undefined."""
    columns = torch.tensor([[each.counts.accepted, each.counts.rounds] for each in requests], dtype=torch.float64)
    bounds = (1.0, 1.0 + requests[0].counts.num_draft_tokens)
    return bootstrap_interval(columns, lambda sums: 1 + sums[:, 0] / sums[:, 1], bounds=bounds)


def write_worst(requests: Sequence[Measured], share: float, path: Path) -> str:
    """Write the ``share`` of the requests whose drafts are accepted worst, with the target's answers, as conversations
    that ``data=messages`` reads; gives the settings of a training on them.
    Raises UserError for a share out of range and for so few requests that none is left for validation."""
    if not 0 < share <= 1:
        raise UserError(f"worst_share is {share}: expected a share of the requests above 0 and up to 1")
    drafted = [each for each in requests if each.counts.rounds and each.answer]
    worst = sorted(drafted, key=lambda each: each.counts.acceptance_length)[: max(1, round(share * len(drafted)))]
    lines = [
        json.dumps(
            {
                "messages": [*each.prompt.opening, {"role": "assistant", "content": each.answer}],
                "category": each.prompt.category,
                "acceptance_length": round(each.counts.acceptance_length, 3),
            },
            ensure_ascii=False,
        )
        for each in worst
    ]
    write_text(path, "".join(f"{line}\n" for line in lines))
    for held_out in _HELD_OUT:
        source = Conversations(str(path), "messages", held_out=held_out)
        try:
            for split in ("train", "validation"):
                source.conversations(split)
        except UserError:
            continue
        more = [] if held_out == _HELD_OUT[0] else [f"data.source.held_out={held_out}"]
        return " ".join(["data=messages", f"data.path={path}", *more])
    few = f"{len(worst)} requests are too few to hold some out for validation"
    raise UserError(f"{few}: expected more traffic (limit=), or a larger worst_share")
