"""Wall clock of the real vLLM on this CPU: plain, with its n-gram drafts, and with our heads, at several concurrencies.

``python benchmarks/serving.py CHECKPOINT... --prompts FILE.jsonl --draft-tokens 1 3 5 --concurrency 1 4 16``: a server
for every contender, all up at once; they take turns on the prompts of a category, the first place rotating, and wait
without work meanwhile. Greedy, in float32: every contender must answer as plain vLLM does, token by token, and what
differs is reported. A second turn follows plain vLLM's answer. Acceptance is vLLM's own count.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from common import REPOSITORY, print_table, write_result
from contenders.vllm_server import counts, serving
from specdraft.data.prompts import Prompt, encode, load_prompts
from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.data.regeneration.server import Server
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.drafters.checkpoint import check_target, find, load_drafter, read_config
from specdraft.errors import UserError, exit_on_user_error
from specdraft.evaluation.bootstrap import bootstrap_interval
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.loading import location

PLAIN, NGRAM = "plain", "ngram"
NGRAM_MAX = 4  # tokens that its lookup compares, as vLLM's documentation has it
COUNTED = ("seconds", "tokens", "rounds", "accepted")


@dataclass
class Block:
    """What one contender did with the prompts of a category, at one concurrency and turn."""

    contender: str
    concurrency: int
    category: str
    turn: int
    seconds: float
    tokens: int
    rounds: float = 0.0
    accepted: float = 0.0
    different: int = 0  # answers unlike plain vLLM's
    answers: list[Ids] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Bench:
    """Servers by contender, and what they are asked."""

    target: Target
    servers: Mapping[str, str]
    max_new_tokens: int

    def run(self, prompts: Sequence[Prompt], concurrency: int, progress: "tqdm[None]") -> Iterator[Block]:
        """Category by category, turn by turn, the contenders in turns."""
        for number, category in enumerate(dict.fromkeys(prompt.category for prompt in prompts)):
            own = [prompt for prompt in prompts if prompt.category == category]
            histories = [list(prompt.opening) for prompt in own]
            for turn in range(1 + max(len(prompt.follow_ups) for prompt in own)):
                ids = [encode(self.target.tokenizer, messages) for messages in histories]
                first = (number + turn) % len(self.servers)
                names = [*self.servers][first:] + [*self.servers][:first]
                blocks = {name: self._block(name, ids, concurrency, category, turn) for name in names}
                expected = blocks[PLAIN].answers
                for block in blocks.values():
                    block.different = sum(a != b for a, b in zip(block.answers, expected, strict=True))
                    progress.update()
                yield from blocks.values()
                going = [i for i, prompt in enumerate(own) if turn < len(prompt.follow_ups)]
                said = [answer_in_words(self.target.tokenizer, expected[i]) for i in going]
                histories = [
                    [
                        *histories[i],
                        {"role": "assistant", "content": words},
                        {"role": "user", "content": own[i].follow_ups[turn]},
                    ]
                    for i, words in zip(going, said, strict=True)
                ]
                own = [own[i] for i in going]
                if not own:
                    break

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """The first passes of every server, which compile and allocate."""
        ids = [encode(self.target.tokenizer, prompt.opening) for prompt in prompts]
        for name in self.servers:
            self._block(name, ids, len(ids), "warm-up", 0)

    def _block(self, name: str, prompts: Sequence[Ids], concurrency: int, category: str, turn: int) -> Block:
        requests = [Request(ids, (), (), 0.0, number, self.max_new_tokens) for number, ids in enumerate(prompts)]
        server = Server(self.servers[name], concurrency=concurrency, timeout=600)
        before = counts(self.servers[name])
        started = time.perf_counter()
        found = sorted(server.answers(self.target, requests, RegenerationSettings()))
        seconds = time.perf_counter() - started
        server.close()
        after = counts(self.servers[name])
        answers = [ids for _, ids in found]
        rounds, accepted = (after[key] - before[key] for key in ("rounds", "accepted"))
        tokens = sum(map(len, answers))
        return Block(name, concurrency, category, turn, seconds, tokens, rounds, accepted, answers=answers)


def contenders(checkpoints: Sequence[Path], draft_tokens: Sequence[int], work: Path) -> dict[str, list[str]]:
    """Flags of vLLM by contender: plain, n-gram drafts and every head, of each number of draft tokens."""
    found: dict[str, list[str]] = {PLAIN: []}
    lookup = {"method": "ngram", "prompt_lookup_max": NGRAM_MAX}
    for k in draft_tokens:
        found[f"{NGRAM}, K = {k}"] = ["--speculative-config", json.dumps(lookup | {"num_speculative_tokens": k})]
    for number, checkpoint in enumerate(checkpoints):
        directory = export(checkpoint, VLLM(dtype="float32"), work / f"head-{number}").resolve()
        family = load_drafter(checkpoint)[0].family
        name = family if len(checkpoints) == 1 else checkpoint.name
        for k in draft_tokens:
            if options := VLLM.options(family, str(directory), k):
                found[f"{name}, K = {k}"] = options
    return found


def summary(blocks: Sequence[Block], contender: str, concurrency: int) -> dict[str, object]:
    """Tokens a second, acceptance length and speedup over plain, with intervals over the blocks' categories."""
    columns = _by_category(blocks, contender, concurrency)
    plain = _by_category(blocks, PLAIN, concurrency)
    both = torch.cat([columns, plain], 1)
    total = columns.sum(0)

    def speedup(sums: Tensor) -> Tensor:
        return (sums[:, 1] / sums[:, 0]) / (sums[:, 5] / sums[:, 4])

    return {
        "contender": contender,
        "concurrency": concurrency,
        "tokens_per_second": float(total[1] / total[0]),
        "acceptance_length": float(1 + total[3] / total[2]) if total[2] else None,
        "speedup": float(speedup(both.sum(0)[None])),
        "speedup_interval": bootstrap_interval(both, speedup, bounds=(0.0, float("inf"))),
        "different_answers": sum(
            b.different for b in blocks if (b.contender, b.concurrency) == (contender, concurrency)
        ),
    }


def _by_category(blocks: Sequence[Block], contender: str, concurrency: int) -> Tensor:
    """Sums of ``COUNTED`` by category, ``[categories, 4]``."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(len(COUNTED), dtype=torch.float64))
    for block in _own(blocks, contender, concurrency):
        sums[block.category] += torch.tensor([getattr(block, name) for name in COUNTED], dtype=torch.float64)
    return torch.stack([*sums.values()])


def _own(blocks: Sequence[Block], contender: str, concurrency: int) -> list[Block]:
    return [block for block in blocks if (block.contender, block.concurrency) == (contender, concurrency)]


def show(blocks: Sequence[Block], concurrencies: Sequence[int]) -> list[dict[str, object]]:
    """Print a table for every concurrency, and one by category; give all rows."""
    names = list(dict.fromkeys(block.contender for block in blocks))
    rows = [summary(blocks, name, concurrency) for concurrency in concurrencies for name in names]
    for concurrency in concurrencies:
        print(f"\n{concurrency} request(s) at a time")
        header = ["contender", "tokens/s", "speedup", "acceptance length", "answers unlike plain's"]
        own = [row for row in rows if row["concurrency"] == concurrency]
        print_table(header, [[str(row["contender"]), *_cells(row)] for row in own])
    categories = list(dict.fromkeys(block.category for block in blocks))
    by_category = []
    for category in categories:
        part = [b for b in blocks if b.category == category and b.concurrency == concurrencies[0]]
        found = {name: summary(part, name, concurrencies[0]) for name in names}
        rows += [row | {"category": category} for row in found.values()]
        by_category.append([category, *(f"{found[name]['speedup']:.2f}" for name in names)])
    print(f"\nspeedup by category, {concurrencies[0]} request(s) at a time")
    print_table(["category", *names], by_category)
    return rows


def _cells(row: Mapping[str, object]) -> list[str]:
    length, interval = row["acceptance_length"], row["speedup_interval"]
    around = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if isinstance(interval, tuple) else ""
    accepted = "" if length is None else f"{length:.2f}"
    return [f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}{around}", accepted, str(row["different_answers"])]


def chosen(path: str, per_category: int | None) -> list[Prompt]:
    """The prompts of a file, at most so many of each category."""
    found, seen = load_prompts(path), Counter[str]()
    kept = []
    for prompt in found:
        seen[prompt.category] += 1
        if per_category is None or seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="drafters of one target: paths, runs, embedded://NAME")
    parser.add_argument("--prompts", default="chat", help="a .jsonl file, or chat, the benchmark of the package")
    parser.add_argument("--per-category", type=int, help="prompts of each category at most")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile, which it does by default")
    parser.add_argument("--engine-python", type=Path, default=REPOSITORY / ".venv-parity/bin/python")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """Start all servers, let them take turns, print and write what was measured."""
    options = arguments()
    if not options.engine_python.is_file():
        raise UserError(f"there is no {options.engine_python}: expected a python with vLLM (make parity)")
    checkpoints = [find(path) for path in options.checkpoints]
    named = read_config(checkpoints[0])["target"]
    target = Target.load(named["name"], named["revision"], dtype="float32", device="cpu")
    for checkpoint in checkpoints:
        check_target(read_config(checkpoint), target)
    prompts = chosen(options.prompts, options.per_category)
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        ways = contenders(checkpoints, options.draft_tokens, Path(work))
        common = ["--max-model-len", str(options.max_model_len), "--max-num-seqs", str(max(options.concurrency))]
        common += ["--enforce-eager"] if options.eager else []
        servers = {}
        for name, flags in tqdm(ways.items(), "starting servers", unit="server"):
            address = location(named["name"])
            servers[name] = stack.enter_context(
                serving(options.engine_python, address, [*common, *flags], available_cores())
            )
        bench = Bench(target, servers, options.max_new_tokens)
        bench.warm_up(prompts[:2])
        turns = sum(
            max(1 + len(p.follow_ups) for p in prompts if p.category == c) for c in {p.category for p in prompts}
        )
        with tqdm(total=turns * len(ways) * len(options.concurrency), desc="serving", unit="block") as bar:
            blocks = [block for each in options.concurrency for block in bench.run(prompts, each, bar)]
    rows = show(blocks, options.concurrency)
    settings = {name: str(value) for name, value in vars(options).items() if name != "engine_python"}
    print(write_result("serving", settings | {"prompts_measured": len(prompts)}, {"rows": rows}))


if __name__ == "__main__":
    main()
