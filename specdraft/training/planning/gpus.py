"""What GPUs can do at best, from their makers' data sheets: the planner's only table of hardware."""

from typing import NamedTuple

from specdraft.errors import UserError

PER_NODE = 8


class Gpu(NamedTuple):
    """flops: dense bf16 FLOP/s. memory: bytes. bandwidth: of the memory, bytes/s. link: to the other GPUs of a node,
    bytes/s in each direction. network: to other nodes, bytes/s for each GPU."""

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float


GPUS = {
    "a100-40gb": Gpu(312e12, 40e9, 1.555e12, 300e9, 25e9),
    "a100": Gpu(312e12, 80e9, 2.039e12, 300e9, 25e9),
    "l40s": Gpu(362e12, 48e9, 0.864e12, 32e9, 25e9),  # PCIe 4.0
    "h100": Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Gpu(989e12, 141e9, 4.8e12, 450e9, 50e9),
    "b200": Gpu(2250e12, 180e9, 7.7e12, 900e9, 50e9),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises UserError for one that the table has not."""
    if name not in GPUS:
        raise UserError(f"planning.gpu is {name!r}: expected one of {', '.join(GPUS)}")
    return GPUS[name]
