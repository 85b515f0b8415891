"""A training step whose hidden states come from a server or a store: ``python benchmarks/feeding.py [--record]``.

An EAGLE-3 head of the embedded target trains on real Python. Its hidden states are given by a server that answers a
batch in the time of a step, as one that reads on other machines does: it sleeps, and sends what it has read before.
Runs with and without reading ahead take turns, and so do those that read a store, whose files have left the page cache.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from safetensors.torch import save_file
from torch import Tensor

from common import alternate, print_table, scratch, write_result
from specdraft.data.datamodule import DataModule
from specdraft.data.places import Folder
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.store import StoreWriter, describe
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from specdraft.targets.server import Server
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from store_reading import forget

ROWS, LENGTH, WARM_UP = 2, 256, 2


class Engine(ThreadingHTTPServer):
    """vLLM's protocol: documents are read one after the other, and each one's states are left in a file."""

    daemon_threads = True
    seconds_per_token = 0.0

    def __init__(self, known: dict[tuple[int, ...], Tensor], folder: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.known, self.folder, self.numbers, self.one = known, Path(folder), itertools.count(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def read(self, ids: list[int]) -> Path:
        """The file of the document's states; its lock is free, as it is whole."""
        path = self.folder / f"{next(self.numbers)}.safetensors"
        with self.one:
            time.sleep(self.seconds_per_token * len(ids))
        save_file({"hidden_states": self.known[tuple(ids)], "token_ids": torch.tensor(ids)}, path)
        path.with_name(f"{path.name}.lock").touch()
        return path


class Handler(BaseHTTPRequestHandler):
    """See ``Engine``."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        """The list of models."""
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        """A document."""
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self._answer({"kv_transfer_params": {"hidden_states_path": str(self.server.read(ids))}})

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Clock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """One more."""
        self.ends.append(time.perf_counter())


def make_data(**options: Any) -> DataModule:
    """Packed rows of the standard library."""
    settings: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": ROWS, "limit": 400, "validation_limit": 8}
    return DataModule(PythonStdlib(), **settings, regenerate=False, **options)


def step_seconds(target: Target, steps: int, **options: Any) -> float:
    """The median over the steps of a run."""
    data, clock = make_data(**options), Clock()
    data.prepare(target)
    torch.manual_seed(0)
    drafter = Eagle3.for_target(target, ttt_steps=3)
    data.read_for(drafter)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps + WARM_UP,
        callbacks=[clock],
        use_distributed_sampler=False,
        limit_val_batches=0,
        **dict.fromkeys(quiet, False),  # type: ignore[arg-type]
    )
    trainer.fit(DrafterModule(drafter, target, OptimizerSettings()), data)
    return statistics.median(end - start for start, end in itertools.pairwise(clock.ends[WARM_UP - 1 :]))


def documents(target: Target, data: DataModule, layers: tuple[int, ...]) -> dict[tuple[int, ...], Tensor]:
    """The states ``[n, a+1, H]``, the last before its norm, of every document, and of the text compared first."""
    texts = [list(range(1, 33))]
    for batch in data.packed["train"].blocks():
        begins = (batch.position_ids.flatten() == 0).nonzero().flatten()
        texts += [ids.tolist() for ids in batch.input_ids.flatten().tensor_split(begins[1:])]
    last: list[Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0][0]))
    known = {}
    with torch.inference_mode():
        for text in texts:
            last.clear()
            aux = target.features(torch.tensor([text]), torch.arange(len(text))[None], layers).aux[0]
            known[tuple(text)] = torch.cat([aux.unflatten(-1, (len(layers), -1)), last[0][:, None]], 1).clone()
    hook.remove()
    return known


def write_store(target: Target, data: DataModule, path: Path, layers: tuple[int, ...]) -> list[Path]:
    """A store in float32; its shards."""
    about = {split: data.about(split) for split in data.packed}
    contents = describe(target, layers, False, "float32", data.packed, data.preparation.settings(), about, 2**25)
    StoreWriter(Folder(path), contents, data.packed).write(partial(target.features, layers=layers), 4)
    return sorted(path.glob("*.safetensors"))


def measure(steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step by contender and round, and the ratios."""
    target = Target.load("embedded://tiny", device="cpu")
    layers, data = target.default_layers(), make_data()
    data.prepare(target)
    with scratch() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as passing:
        shards = write_store(target, data, Path(folder) / "states", layers)
        engine = Engine(documents(target, data, layers), passing)

        def served(ahead: int) -> float:
            target.server = Server(f"http://127.0.0.1:{engine.server_port}", concurrency=8)
            return step_seconds(target, steps, read_ahead=ahead)

        def stored(ahead: int) -> float:
            target.server = None
            forget(shards)
            return step_seconds(target, steps, read_ahead=ahead, store=str(Path(folder) / "states"))

        head = min(stored(2) for _ in range(3))  # what a step costs whose hidden states are there
        engine.seconds_per_token = head / (ROWS * LENGTH)
        runs: dict[str, Callable[[], float]] = {
            "hidden states there": lambda: stored(2),
            "server, in the step": lambda: served(0),
            "server, read ahead": lambda: served(2),
            "store, in the step": lambda: stored(0),
            "store, read ahead": lambda: stored(2),
        }
        seconds = alternate(runs, rounds)
        engine.shutdown()
        engine.server_close()
    return {"server_seconds": head, "seconds": seconds, "ratios": ratios(head, seconds)}


def ratios(server: float, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds of a step over the larger of server and head, and over their sum."""
    rounds = range(len(seconds["hidden states there"]))
    heads = seconds["hidden states there"]

    def median(name: str, over: Callable[[float], float]) -> float:
        return statistics.median(seconds[name][k] / over(heads[k]) for k in rounds)

    return {
        "read ahead / larger": median("server, read ahead", lambda head: max(server, head)),
        "read ahead / sum": median("server, read ahead", lambda head: server + head),
        "in the step / sum": median("server, in the step", lambda head: server + head),
    }


def main() -> None:
    """Measure, print, and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    found = measure(options.steps, options.rounds)
    rows = [(name, f"{1e3 * statistics.median(values):.0f}") for name, values in found["seconds"].items()]
    print_table(("ms a step", "median"), [*rows, ("server alone", f"{1e3 * found['server_seconds']:.0f}")])
    print_table(("server", "ratio"), [(name, f"{value:.2f}") for name, value in found["ratios"].items()])
    if options.record:
        settings = {"rows": ROWS, "length": LENGTH, "steps": options.steps, "rounds": options.rounds}
        print(write_result("feeding", settings | {"threads": torch.get_num_threads()}, found))


if __name__ == "__main__":
    main()
