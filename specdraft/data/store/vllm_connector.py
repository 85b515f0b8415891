"""vLLM's hidden-state connector for its CPU build: the original copies through pinned memory and CUDA streams.

n = tokens of a request, a = extracted layers, H = hidden size.

It runs in vLLM's process, whose environment holds no specdraft."""

import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesOnCPU(ExampleHiddenStatesConnector):
    """Writes a request's file at once; its format, names and locks are the original's."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))  # [n, a, H]
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        self._req_copy_events[pending.req_id] = _Done()
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, _Done(), pending.filename, self._lock_fds.pop(pending.req_id, None))
