"""What it takes on this CPU to attend to cached keys that several query heads share.

``python benchmarks/attention.py``: thirty layers of SmolLM2-135M's shape (9 query heads, 3 of keys, 64 wide), each with
keys of its own, so that no cache holds them all, read by requests side by side that ask with one token or six. In
turns: keys copied for every query head, as transformers does under a mask; torch told of the sharing (``enable_gqa``);
and ``specdraft.attention``, which hands the heads over as further tokens. Beside them the time of copying keys and
values once.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common import alternate, print_table, write_result
from specdraft.attention import shared_attention

LAYERS, HEADS, SHARED, SIZE, ROOM = 30, 9, 3, 64, 512
SETTINGS = ((1, 1, 400), (1, 6, 400), (16, 1, 300), (16, 6, 300), (128, 1, 100), (128, 1, 300))
DTYPES = (torch.float32, torch.bfloat16)

Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def copied(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Keys and values once for every query head."""
    keys, values = (part.repeat_interleave(SHARED, dim=1) for part in (keys, values))
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)


def told(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The kernel reads the same keys for several heads."""
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def copy_alone(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """No attention: the bytes."""
    keys.clone()
    return values.clone()


WAYS: dict[str, Way] = {"copied": copied, "enable_gqa": told, "shared": shared_attention, "copy alone": copy_alone}


def seconds_a_layer(way: Way, query: Tensor, caches: list[tuple[Tensor, Tensor]], mask: Tensor) -> float:
    """Of one pass through all layers, after one to warm up."""
    for _ in range(2):
        started = time.perf_counter()
        for keys, values in caches:
            way(query, keys[:, :, : mask.shape[-1]], values[:, :, : mask.shape[-1]], mask)
    return (time.perf_counter() - started) / len(caches)


@torch.inference_mode()
def main() -> None:
    """Parse options, measure in turns, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for requests, tokens, held in SETTINGS:
            room = (requests, HEADS // SHARED, ROOM, SIZE)
            caches = [(torch.randn(room, dtype=dtype), torch.randn(room, dtype=dtype)) for _ in range(LAYERS)]
            query = torch.randn((requests, tokens, HEADS, SIZE), dtype=dtype).transpose(1, 2)
            mask = torch.ones((requests, 1, tokens, held), dtype=torch.bool)
            runs = {name: partial(seconds_a_layer, way, query, caches, mask) for name, way in WAYS.items()}
            times = {name: statistics.median(each) for name, each in alternate(runs, arguments.rounds).items()}
            name = str(dtype).removeprefix("torch.")
            measured.append({"dtype": name, "requests": requests, "tokens": tokens, "held": held, **times})
    rows = [
        [each["dtype"], *(str(each[key]) for key in ("requests", "tokens", "held"))]
        + [f"{1e3 * each[name]:.2f}" for name in WAYS]
        + [f"{each['enable_gqa'] / each['shared']:.2f}x"]
        for each in measured
    ]
    print_table(["ms a layer", "requests", "tokens", "keys", *WAYS, "enable_gqa / shared"], rows)
    print(f"\nwritten to {write_result('attention', vars(arguments), {'layers': measured})}")


if __name__ == "__main__":
    main()
