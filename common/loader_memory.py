"""How many processes read batches, and how many batches each has ready, within the shared memory there is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from common import log
from common.errors import InputError

_LOG = log.get("loader_memory")
_SHARED = Path("/dev/shm")
WORKERS = 4  # a loader, beside a GPU
PREFETCH = 4
# While the held-out rows are measured, the batches that the trained rows' processes have ready stay there.
LOADERS = 2


@dataclass(frozen=True)
class Reading:
    """How the batches of one training process are read.

    Attributes:
        workers: processes a loader; 0 reads in the training process.
        prefetch: batches that each has ready.
        tokens: of a batch.
        token_bytes: of a token with its states.
        limit: bytes of shared memory for all training processes of this machine.
    """

    workers: int
    prefetch: int
    tokens: int
    token_bytes: int
    limit: float

    @classmethod
    def fit(
        cls, *, tokens: int, token_bytes: int, workers: int | None, default: int, limit: float | None
    ) -> Reading:
        """Choose workers and prefetch.

        Args:
            tokens: of a batch.
            token_bytes: of a token with its states.
            workers: what was asked for; None leaves it to the memory, up to `default`.
            default: workers where memory is no matter.
            limit: bytes of shared memory; None takes half of what /dev/shm has free, or a quarter of the
                free memory where there is no such place.

        Raises:
            InputError: the workers that were asked for do not fit with one batch each.
        """
        limit = _offered() if limit is None else limit
        fitting = int(limit / _processes() / (LOADERS * tokens * token_bytes))  # batches a loader
        if workers and workers > fitting:
            raise InputError(
                f"--num-workers {workers}: with one batch each, {_processes()} processes x "
                f"{LOADERS} loaders x {workers} workers x {tokens} tokens x {token_bytes} bytes = "
                f"{log.human_bytes(_processes() * LOADERS * workers * tokens * token_bytes)} of shared "
                f"memory, and --loader-memory is {log.human_bytes(limit)}. Take at most --num-workers "
                f"{fitting}, or raise --loader-memory (and /dev/shm, in a container by --shm-size)."
            )
        chosen = min(default, fitting) if workers is None else workers
        if workers is None and chosen < default:
            _LOG.warning(
                "%d reading processes a loader instead of %d: more do not fit into %s of shared memory. "
                "Raise --loader-memory (and /dev/shm, in a container --shm-size) or lower --total-seq-len.",
                *(chosen, default, log.human_bytes(limit)),
            )
        prefetch = min(PREFETCH, fitting // chosen) if chosen else PREFETCH
        return cls(chosen, prefetch, tokens, token_bytes, limit)

    def describe(self) -> None:
        """Show the shared memory with its formula."""
        if not self.workers:
            _LOG.info("loader memory: none, the training process reads its batches itself")
            return
        size = _processes() * LOADERS * self.workers * self.prefetch * self.tokens * self.token_bytes
        _LOG.info(
            "loader memory: %d processes x %d loaders x %d workers x %d batches x %d tokens x %d bytes "
            "= %s of %s",
            *(_processes(), LOADERS, self.workers, self.prefetch),
            *(self.tokens, self.token_bytes, log.human_bytes(size), log.human_bytes(self.limit)),
        )


def _processes() -> int:
    """Training processes on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _offered() -> float:
    if _SHARED.is_dir():
        return shutil.disk_usage(_SHARED).free / 2
    return psutil.virtual_memory().available / 4
