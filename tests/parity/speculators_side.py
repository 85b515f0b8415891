"""The peer's half of ``make parity-speculators``: the train command of speculators 0.9.0, on a CPU.

Runs in an environment of its own, which holds speculators and not specdraft, with the arguments of ``speculators
train``. Its trainer takes for granted that there is a GPU: the two places are moved here, and nothing else is."""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # before torch is imported, which reads them once
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

trainer.get_local_rank = lambda: "cpu"  # where it puts the model and its batches: the GPU of the rank's number
torch.accelerator.synchronize = lambda *_: None  # it waits for the GPU before it reads the clock

if __name__ == "__main__":
    main(TrainConfig.resolve(sys.argv[1:]))
