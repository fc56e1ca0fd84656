"""The device of a run and the processes of a `torchrun`, with what speculators lacks without a GPU."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from speculators.train import distributed

from common import log
from common.errors import InputError, StageError

T = TypeVar("T")


def start(choice: Literal["auto", "cpu", "cuda"]) -> tuple[torch.device, torch.dtype]:
    """Settle the device, join the other processes of a `torchrun`, and prepare speculators for a CPU.

    Args:
        choice: auto takes a GPU where there is one.

    Returns:
        The device, and the dtype of states and of mixed precision: bfloat16 where the device computes in it.

    Raises:
        InputError: a GPU is asked for and absent.
    """
    if choice == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no GPU is visible. Pass --device cpu, or check nvidia-smi.")
    atexit.register(distributed.maybe_destroy_distributed)
    if choice != "cpu" and torch.cuda.is_available():
        distributed.maybe_setup_distributed()
        device, dtype = torch.device("cuda", distributed.get_local_rank()), torch.bfloat16
    else:
        _prepare_cpu()
        device, dtype = torch.device("cpu"), torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    if not is_main():
        log.setup(logging.WARNING)
    return device, dtype


def _prepare_cpu() -> None:
    """All that speculators 0.9.0 lacks on a machine without an accelerator."""
    device: Any = torch.device("cpu")
    distributed._local_rank = device  # it moves model and batches there
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator")
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
        distributed._rank, distributed._world_size = dist.get_rank(), dist.get_world_size()
        distributed._is_distributed = True
        distributed._init_sp_process_groups(dist.get_rank(), dist.get_world_size(), 1)


def _cpu_has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_main() -> bool:
    """Whether this process writes files: the first of a `torchrun`, or the only one."""
    return distributed.get_rank() == 0


def count() -> int:
    """How many processes train together."""
    return distributed.get_world_size()


def main_decides(work: Callable[[], T]) -> T:
    """Let the main process do something that only one may do, and give every process its result.

    Raises:
        StageError: what the main process raised, on every process.
    """
    if not dist.is_initialized():
        return work()
    answer: list[Any] = [None, None]
    if is_main():
        try:
            answer[0] = work()
        except StageError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
