"""What data costs: ``python benchmarks/data.py [--parts preparation store waiting]``.

preparation   tokens per second of reading, splitting, tokenizing with loss masks, writing and packing conversations of
              two turns, by one process and by all cores; beside it `datasets` with the same masks, rendered and
              tokenized the plain way, and documents packed one behind the other
store         bytes per token of hidden states, and read rates beside those of plain files
waiting       the share of a training run on the embedded target that waits for its batches, hidden states computed, or
              read from a store
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets

from common import alternate, median_ratio, print_table, scratch, write_result
from corpus import data_module, write_conversations
from specdraft.data.sources.conversations import Conversations
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target
from store_reading import compare_dtypes

ROOT = Path(__file__).parent.parent
LENGTH = 512
PARTS = ("preparation", "store", "waiting")


def plain(target: Target, path: Path, cache: Path, processes: int) -> int:
    """The tokens of all conversations, by ``datasets`` and a loop over turns; rows as people write them by hand."""
    tokenizer = target.tokenizer

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        for turn, message in enumerate(row["messages"]):
            text = tokenizer.apply_chat_template(row["messages"][: turn + 1], tokenize=False)
            new = tokenizer(text, add_special_tokens=False)["input_ids"][len(ids) :]
            ids += new
            mask += [int(message["role"] == "assistant")] * len(new)
        return {"input_ids": ids, "loss_mask": mask}

    def pack(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: [value for row in values for value in row] for name, values in rows.items()}
        starts = range(0, len(joined["input_ids"]), LENGTH)
        return {name: [values[start : start + LENGTH] for start in starts] for name, values in joined.items()}

    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    tokens = loaded.map(tokenize, num_proc=processes, remove_columns=loaded.column_names)
    packed = tokens.map(pack, batched=True, num_proc=processes)
    return sum(map(len, packed.with_format("numpy")["input_ids"]))


def ours(target: Target, path: Path, cache: Path, processes: int) -> int:
    """The tokens of all conversations, as train.py prepares them."""
    data = data_module(Conversations(str(path), held_out=0.001), cache, processes, sequence_length=LENGTH)
    data.prepare(target)
    return sum(data.about(split)["tokens"] for split in ("train", "validation"))


def preparation(target: Target, megabytes: int, rounds: int) -> dict[str, Any]:
    """Tokens per second, in turns."""
    cores = available_cores()
    datasets.disable_progress_bars()
    with scratch() as folder:
        path = Path(folder) / "conversations.jsonl"
        conversations = write_conversations(path, megabytes * 10**6)

        def rate(way: Any, processes: int) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as cache:  # nothing is found from before
                started = time.perf_counter()
                tokens = way(target, path, Path(cache), processes)
                return tokens / (time.perf_counter() - started)

        runs = {
            f"{name}, {count} process{'es' * (count > 1)}": (lambda way=way, count=count: rate(way, count))
            for name, way in (("specdraft", ours), ("datasets", plain))
            for count in sorted({1, cores})
        }
        rates = alternate(runs, rounds)
    print_table(
        ["preparation", "tokens/s", "of datasets, 1 process"],
        [
            [name, f"{statistics.median(found):,.0f}", f"{median_ratio(found, rates['datasets, 1 process']):.2f}x"]
            for name, found in rates.items()
        ],
    )
    return {"conversations": conversations, "megabytes": megabytes, "tokens_per_second": rates}


def waiting(steps: int) -> dict[str, Any]:
    """The share of the time in which training waits for data, as the run itself logs it."""
    shares: dict[str, dict[str, float]] = {}
    with scratch() as name:
        folder = Path(name)
        data = ["data.regenerate=false", "data.limit=400", f"data.cache_dir={folder / 'cache'}"]
        for way in ("computed", "bfloat16", "float8"):
            store = [] if way == "computed" else [f"data.store={folder / way}"]
            if store:
                command = [sys.executable, "-m", "specdraft", "store", *data, *store, f"dtype={way}"]
                subprocess.run(command, cwd=ROOT, check=True)
            run = folder / f"run-{way}"
            quick = [f"trainer.max_steps={steps}", "trainer.log_every_n_steps=10", "live.every_n_steps=0"]
            quick += ["live.prompts=1", "live.max_new_tokens=2", "evaluate=false", "export=null"]
            command = [sys.executable, "train.py", *data, *store, *quick, f"hydra.run.dir={run}"]
            subprocess.run(command, cwd=ROOT, check=True)
            with (run / "metrics.csv").open() as file:
                rows = [row for row in csv.DictReader(file) if row["train/data_wait_share"]]
            shares[way] = {
                "mean": statistics.mean(float(row["train/data_wait_share"]) for row in rows[1:]),
                "largest": max(float(row["train/data_wait_share"]) for row in rows[1:]),
                "tokens_per_second": statistics.median(float(row["train/tokens_per_second"]) for row in rows[1:]),
            }
    print_table(
        ["hidden states", "waiting", "largest share of 10 steps", "tokens/s"],
        [
            [way, f"{found['mean']:.2%}", f"{found['largest']:.2%}", f"{found['tokens_per_second']:.0f}"]
            for way, found in shares.items()
        ],
    )
    return shares


@exit_on_user_error
def main() -> None:
    """Parse options, run the parts, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--megabytes", type=int, default=8, help="of conversations to prepare (default 8)")
    parser.add_argument("--rows", type=int, default=256, help="of 512 tokens in the store (default 256)")
    parser.add_argument("--steps", type=int, default=100, help="of training whose waiting is measured (default 100)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if "waiting" in arguments.parts:
        result["waiting"] = waiting(arguments.steps)
    if "preparation" in arguments.parts:
        target = Target.load("embedded://tiny", dtype="float32", device="cpu")
        result["preparation"] = preparation(target, arguments.megabytes, arguments.rounds)
    if "store" in arguments.parts:
        target = Target.load("embedded://tiny", dtype="bfloat16", device="cpu")
        result["store"] = compare_dtypes(target, arguments.rows, arguments.rounds)
    print(f"\nwritten to {write_result('data', vars(arguments), result)}")


if __name__ == "__main__":
    main()
