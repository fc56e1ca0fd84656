"""Runs inside vLLM: its hidden-state connector, able to read a KV cache that lies in main memory.

vLLM loads it by `kv_connector_module_path`; `common.vllm_server.capture_args` has the flags. Nothing of this
suite but this file is imported by the server.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _Done:
    """Stands in for the CUDA event of a copy that has already happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `{hidden_states: [T, A+1, H], token_ids: [T] int64}` for each request, on a GPU and on a CPU.

    The base class copies through pinned memory and CUDA streams, which a CPU build of torch does not have.
    """

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Add the layer ids to the answer, so that a client can see whether they are the ones it wants."""
        delayed, answer = super().request_finished(request, block_ids)
        speculative = self._vllm_config.speculative_config
        if answer is not None and speculative is not None:
            answer["layer_ids"] = list(
                speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
            )
        return delayed, answer

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        tensors = {
            "hidden_states": self._gather(pending.block_ids, pending.token_ids.shape[0]),
            "token_ids": pending.token_ids.clone(),
        }
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        copied = cast("torch.cuda.Event", _Done())
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _gather(self, block_ids: list[int], num_tokens: int) -> torch.Tensor:
        """Copy a request's states out of the paged cache, before its blocks are given to another.

        Args:
            block_ids: the request's blocks in order.
            num_tokens: T.

        Returns:
            [T, A+1, H], contiguous, in the cache's dtype.
        """
        assert self._kv_cache is not None
        # The cache is [blocks, A+1, tokens of a block, H].
        blocks = self._kv_cache[torch.tensor(block_ids, dtype=torch.long)]
        return blocks.transpose(1, 2).flatten(0, 1)[:num_tokens].contiguous()
