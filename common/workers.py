"""Processes that work through a stream in order, holding few of its items at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from common.errors import StageError

_WINDOW_BYTES = 64_000_000  # of items whose results were not yet taken; texts come back about as large

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def parallel(count: int, *, preload: Sequence[str] = ()) -> Iterator[Map]:
    """Yield an ordered `map(work, items)` over processes; with one worker it is the built-in one.

    Args:
        count: number of processes; each takes an item and has the next one waiting, within 64 MB of items.
        preload: packages that every worker needs and that are heavy; they are imported once and shared. The
            first call of a process decides.

    Raises:
        StageError: a process was killed.
    """
    if count <= 1:
        yield map
        return
    # Not fork: this process has threads. Not spawn: with PyTorch 400 MB and five seconds for each worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    with ProcessPoolExecutor(count, context, initializer=_start) as pool:
        try:
            yield lambda work, items: _bounded_map(pool, work, items, 2 * count)
        except BrokenProcessPool:
            raise StageError(
                "a worker process was killed, most often for want of memory. Run again with fewer --workers."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _bounded_map(
    pool: ProcessPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], window: int
) -> Iterator[Any]:
    # The executor's own map would take in the whole stream at once.
    pending: deque[tuple[int, Future[Any]]] = deque()
    held = 0
    for item in items:
        size = len(pickle.dumps(item))  # what the executor will send, too
        while pending and (len(pending) >= window or held + size > _WINDOW_BYTES):
            taken, future = pending.popleft()
            held -= taken
            yield future.result()
        pending.append((size, pool.submit(work, item)))
        held += size
    while pending:
        yield pending.popleft()[1].result()


def _start() -> None:
    # The parent alone answers Ctrl-C; a worker whose parent was killed would wait for work for ever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
