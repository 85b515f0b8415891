"""Memory while 2 GB of conversations are prepared: ``python benchmarks/memory.py [--megabytes 2048]``.

JSON Lines of that size, each line another conversation, are read, split, tokenized with loss masks, written and packed,
as train.py does with data.regenerate=false. Memory is the proportional set size (a page that n processes share counts
1/n for each) of this process and its workers together, looked at twice a second, the libraries included; pages of the
mapped files of tokens, which the kernel takes back when it needs them, are in it too.
"""

import argparse
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from common import print_table, scratch, write_result
from corpus import data_module, write_conversations
from specdraft.data.sources.conversations import Conversations
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target


class Watch(threading.Thread):
    """The largest memory of this process and its children so far, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()
        self.samples: list[int] = []

    def run(self) -> None:
        """Look until ``over`` is set."""
        me = psutil.Process()
        while not self.over.wait(0.5):
            total = 0
            for process in (me, *me.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += process.memory_full_info().pss
            self.samples.append(total)
            self.peak = max(self.peak, total)


@exit_on_user_error
def main() -> None:
    """Parse options, write the file, prepare it under watch, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="of JSON Lines (default 2048)")
    parser.add_argument("--processes", type=int, default=available_cores(), help="that tokenize (default: all cores)")
    arguments = parser.parse_args()

    target = Target.load("embedded://tiny", dtype="float32", device="cpu")
    watch = Watch()
    with scratch() as name:
        folder = Path(name)
        path = folder / "conversations.jsonl"
        conversations = write_conversations(path, arguments.megabytes * 10**6)
        size = path.stat().st_size
        before = psutil.Process().memory_full_info().pss
        watch.start()
        started = time.perf_counter()
        data = data_module(Conversations(str(path)), folder / "cache", arguments.processes)
        data.prepare(target)
        seconds = time.perf_counter() - started
        watch.over.set()
        watch.join()
        tokens = data.about("train")["tokens"] + data.about("validation")["tokens"]
    tenths = [max(watch.samples[i * len(watch.samples) // 10 :][: -(-len(watch.samples) // 10)]) for i in range(10)]
    result = {
        "bytes": size,
        "conversations": conversations,
        "tokens": tokens,
        "seconds": seconds,
        "memory_before": before,
        "memory_peak": watch.peak,
        "memory_by_tenth_of_the_time": tenths,
    }
    print_table(
        ["", "GB of JSON", "conversations", "tokens", "minutes", "memory before", "peak"],
        [
            [
                "prepared",
                f"{size / 1e9:.2f}",
                f"{conversations:,}",
                f"{tokens:,}",
                f"{seconds / 60:.1f}",
                f"{before / 1e9:.2f} GB",
                f"{watch.peak / 1e9:.2f} GB",
            ]
        ],
    )
    print("peak by tenth of the time, GB: " + "  ".join(f"{value / 1e9:.2f}" for value in tenths))
    print(f"\nwritten to {write_result('memory', vars(arguments), result)}")


if __name__ == "__main__":
    main()
