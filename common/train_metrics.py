"""What a run tells while it trains: `metrics.jsonl`, and the loggers of speculators beside it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from speculators.train.logger import TensorBoardHandler

from common import acceptance, atomic_io
from common.acceptance import Acceptance
from common.processes import is_main

_METRICS = logging.getLogger("speculators.metrics")


@contextlib.contextmanager
def recording(folder: Path, step: int) -> Iterator[None]:
    """`metrics.jsonl`, and TensorBoard where it is installed, behind speculators' logger of metrics.

    Args:
        folder: `checkpoints/`.
        step: the step that is resumed; later rows are of steps that go again. 0 begins anew.
    """
    if not is_main():
        yield
        return
    path = folder / "metrics.jsonl"
    if path.exists():
        kept = [row for row in atomic_io.read_json_lines(path) if step and row["step"] <= step]
        with atomic_io.replacing(path) as file:
            for row in kept:
                file.write(json.dumps(row) + "\n")
    handlers: list[logging.Handler] = [_JsonHandler(path)]
    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401

        handlers.append(
            TensorBoardHandler(log_dir=folder, run_name="tensorboard", purge_step=step + 1 if step else None)
        )
    propagate, level = _METRICS.propagate, _METRICS.level
    _METRICS.propagate = False
    _METRICS.setLevel(logging.INFO)
    for handler in handlers:
        _METRICS.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _METRICS.removeHandler(handler)
            handler.close()
        _METRICS.propagate = propagate
        _METRICS.setLevel(level)


class _JsonHandler(logging.Handler):
    """One JSON line a record: `{"step", "train": {...}}` or `{"step", "held_out": {...}}`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._log = atomic_io.JsonLog(path)

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, dict)
        self._log.append({"step": record.__dict__["step"], **record.msg})

    def close(self) -> None:
        self._log.close()
        super().close()


def held_out(step: int, found: dict[str, Acceptance]) -> None:
    """Record what the held-out rows gave, by source."""
    whole = acceptance.total(found.values())
    row = {
        "acceptance_length": whole.length,
        **{f"position_{k}": share for k, share in enumerate(whole.by_position)},
        "by_source": {name: part.length for name, part in found.items()},
    }
    _METRICS.info({"held_out": row}, extra={"step": step})


def trained(step: int, row: dict[str, float]) -> None:
    """Record a training step."""
    _METRICS.info({"train": row}, extra={"step": step})
