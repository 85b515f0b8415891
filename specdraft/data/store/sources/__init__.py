"""Where a store's hidden states come from: the target in this process, or vLLM, started here or elsewhere."""

from specdraft.data.store.sources.in_process import InProcess
from specdraft.data.store.sources.source import FeatureSource
from specdraft.data.store.sources.vllm import VLLM
from specdraft.targets.server import Server

__all__ = ["VLLM", "FeatureSource", "InProcess", "Server"]
