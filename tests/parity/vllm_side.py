"""The engine's half of the parity check. Runs in an environment of its own, which holds vLLM and not specdraft; what
vLLM loads of specdraft by name it finds on PYTHONPATH.

``python -P tests/parity/vllm_side.py request.json answer.json``: decodes the request's prompts in each of its runs (a
speculative configuration or none, perhaps a sampling of its own), and writes all as the fields of
``tests.parity.comparison.Run``.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before vllm is imported, which reads them once. One process: no port, no spawn, metrics at hand. One thread: for so
# small a model more threads are no faster, and on busy cores their spinning made it sixty times slower.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample import rejection_sampler


def expand(x: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Each request's value for each of its draft tokens, as vLLM's ``expand_batch_to_tokens`` says."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)


# On a CPU vLLM 0.32 converts the tensor to be filled to int64 and fills the copy: temperatures are then whatever lay in
# memory, and what speculation emits above temperature 0 is not the target's distribution. GPUs run another kernel.
rejection_sampler.expand_batch_to_tokens = expand


def normalize_keys(model: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
    """Context keys ``[layers, tokens, heads, d]`` normed by each layer's own weights."""
    mean = keys.float().square().mean(-1, keepdim=True)
    normed = (keys.float() * torch.rsqrt(mean + model._rms_norm_eps)).to(keys.dtype)
    return normed * model._k_norm_weights[:, None, None]


# On a processor with AMX vLLM 0.32 gives layers in int8 a kernel that refuses inputs in fp32 ("expect A to be bfloat16
# or half"); here they take the one of all other processors.
scaled_mm.check_cpu_sgl_kernel = lambda *_: False


# On a CPU vLLM 0.32's rms_norm reads the first row of a weight of several, so that the context keys of every layer are
# normed by the first layer's weights. GPUs run another kernel. docs/serving.md has the minimal case.
DFlashQwen3Model._normalize_context_k = normalize_keys

METRIC = "vllm:spec_decode_num_"
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def structured(grammar: list[str] | None) -> StructuredOutputsParams | None:
    """What answers follow, as vLLM is told it."""
    if grammar is None:
        return None
    kind, text = grammar
    return StructuredOutputsParams(json=text) if kind == ".json" else StructuredOutputsParams(regex=text)


def decode(name: str, request: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Tokens of every prompt and, with drafting, vLLM's own counts: in total and per verification step."""
    started = time.perf_counter()
    speculative, sampling = run.get("flags"), run.get("sampling", request["sampling"])
    llm = LLM(
        model=request["target"],
        revision=request["revision"],
        hf_overrides=run.get("overrides"),
        dtype="float32",  # "auto" would round the target to bfloat16: other tokens, other counts
        enforce_eager=True,
        max_model_len=request["max_model_len"],
        max_num_seqs=run.get("max_num_seqs", request["max_num_seqs"]),
        disable_log_stats=False,
        use_tqdm_on_load=False,
        per_request_spec_decode_metrics="detailed" if speculative else "none",
        seed=0,
        speculative_config=speculative,
        additional_config=run.get("additional", {}),
        structured_outputs_config={"backend": "guidance"},
    )
    loaded = time.perf_counter()
    if sampling == "served":
        own = llm.get_default_sampling_params()
        sampling = {name: getattr(own, name) for name in SAMPLING}
    # Both sides stop at the same ids: the request's, not those that vLLM would look up.
    asked = [
        SamplingParams(
            **sampling,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["eos_token_ids"],
            ignore_eos=True,
            detokenize=False,
            seed=number if sampling["temperature"] else None,
            structured_outputs=structured(request["grammar"]),
        )
        for number in range(len(request["prompts"]))
    ]
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False)]
    steps = [output.spec_decode_metrics for output in outputs] if speculative else []
    metrics = {metric.name: metric for metric in llm.get_metrics()} if speculative else {}
    answer = {
        "tokens": [list(output.token_ids) for output in outputs],
        # A request that ended with its first token has no step.
        "drafted_per_round": [list(step.per_step_drafted) if step else [] for step in steps],
        "accepted_per_round": [list(step.per_step_accepted) if step else [] for step in steps],
        "counts": {
            "rounds": metrics[METRIC + "drafts"].value,
            "drafted": metrics[METRIC + "draft_tokens"].value,
            "accepted": metrics[METRIC + "accepted_tokens"].value,
            "accepted_per_position": list(metrics[METRIC + "accepted_tokens_per_pos"].values),
        }
        if speculative
        else {},
    }
    print(f"vLLM {name}: load {loaded - started:.1f} s, generate {time.perf_counter() - loaded:.1f} s", flush=True)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


def main() -> None:
    """Read the request, decode in every run, write the answers."""
    request = json.loads(Path(sys.argv[1]).read_text())
    answer = {run["name"]: decode(run["name"], request, run) for run in request["runs"]}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
