"""Two processes that share nothing but a bucket, by the real command; one is killed."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdraft.data.bucket import Bucket

REPOSITORY = Path(__file__).parents[3]
DATA = ["target=tiny", "data.limit=36", "data.validation_limit=8", "data.max_new_tokens=16", "data.batch_size=1"]
DATA += [f"+data.source.root={Path(logging.__file__).parent}"]  # of which four machines soon know the functions
DATA += ["imports=[tests.data.store.short_lease]"]


def start(command: list[str], cache: Path) -> "subprocess.Popen[str]":
    """A process of a machine whose disk is ``cache``."""
    environment = {**os.environ, "SPECDRAFT_CACHE": str(cache), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "specdraft", *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_a_store_of_two_machines_equals_that_of_one(bucket_url, tmp_path):
    shared, settings = Bucket(f"{bucket_url}/states"), [*DATA, "dtype=bfloat16", "shard_mb=1"]
    through = [f"data.store={shared}", f"data.share={bucket_url}/answers"]
    first = start(["store", *settings, *through], tmp_path / "first")
    while not any(name.startswith("train-0") for name in shared.names()):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.2)
    second = start(["store", *settings, *through], tmp_path / "second")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said

    alone = start(["store", *settings, f"data.store={tmp_path / 'alone'}"], tmp_path / "third")
    said = alone.communicate(timeout=600)[0]
    assert alone.returncode == 0, said
    files = sorted((tmp_path / "alone").iterdir())
    assert shared.names() == [file.name for file in files] and len(files) > 6
    assert all(shared.read(file.name) == file.read_bytes() for file in files)
    assert not [name for name in shared._files.ls(shared._root) if name.endswith(".claim")]

    run = tmp_path / "run"
    options = ["trainer.max_steps=4", "live.every_n_steps=0", "evaluate=false", "export=null", f"hydra.run.dir={run}"]
    trained = start(["train", *DATA, f"data.store={shared}", *options], tmp_path / "fourth")
    said = trained.communicate(timeout=600)[0]
    assert trained.returncode == 0, said
    assert (run / "drafter" / "config.json").is_file()
    assert not (tmp_path / "fourth" / "responses").exists()
