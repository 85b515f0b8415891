"""vLLM in this process answers: token ids in and out, all requests of a shard at once, batched by vLLM itself."""

import gc
import importlib.util
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.decoding.served import SHAPING
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.loading import location


class VLLMOffline:
    """``vllm.LLM`` on the target's own files, in the target's dtype unless ``options`` say otherwise."""

    name = "vllm"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """``options`` go to ``vllm.LLM``: tensor_parallel_size, gpu_memory_utilization, ... Raises UserError."""
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "generator=vllm needs vLLM, which is not installed here: run `pip install vllm` in an environment "
                "with a GPU, or start `vllm serve` elsewhere and use generator=server generator.url=URL"
            )
        self.options = dict(options or {})
        self._llm: Any = None

    def answers(
        self, target: Target, requests: Sequence[Request], settings: RegenerationSettings, known: Container[int] = ()
    ) -> Iterator[tuple[int, Ids]]:
        """As ``Engine`` says."""
        numbers = [number for number in range(len(requests)) if number not in known]
        if not numbers:
            return
        from vllm import LLM, SamplingParams

        if self._llm is None:
            own = {"revision": target.identity.revision, "dtype": str(target.dtype).removeprefix("torch.")}
            shape = {"max_model_len": target.max_length, "seed": 0}
            self._llm = LLM(location(target.identity.name), **own | shape | self.options)
        asked = [requests[number] for number in numbers]
        # Both stop at the target's end marks, and nothing but what is asked for shapes the distribution.
        stops = {"stop_token_ids": sorted(target.eos_token_ids), "ignore_eos": True}
        common = {"detokenize": False} | stops
        sampling = [
            SamplingParams(
                temperature=one.sampling.temperature,
                seed=one.seed,
                max_tokens=one.max_new_tokens,
                **{name: getattr(one.sampling, name) for name in SHAPING},
                **common,
            )
            for one in asked
        ]
        prompts = [{"prompt_token_ids": one.prompt} for one in asked]
        for number, output in zip(numbers, self._llm.generate(prompts, sampling, use_tqdm=False), strict=True):
            yield number, list(output.outputs[0].token_ids)

    def close(self) -> None:
        """Free the engine's memory, so that training has it."""
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
