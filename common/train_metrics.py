"""What a run tells while it trains: `metrics.jsonl`, and the loggers of speculators beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from speculators.train.logger import MLFlowHandler, TensorBoardHandler, TrackioHandler, WandbHandler

from common import acceptance, atomic_io, log
from common.acceptance import Acceptance
from common.errors import StageError
from common.processes import is_main

_LOG = log.get("train_metrics")
_METRICS = logging.getLogger("speculators.metrics")
_SMOOTH = 25


@contextlib.contextmanager
def recording(folder: Path, step: int, report_to: str | None = None) -> Iterator[None]:
    """`metrics.jsonl` and one more logger behind speculators' logger of metrics; at the end, a plot.

    Args:
        folder: `checkpoints/`.
        step: the step that is resumed; later rows are of steps that go again. 0 begins anew.
        report_to: the other logger, `none`, or None for TensorBoard where it is installed.
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
    handlers: list[logging.Handler] = [_JsonHandler(path), *_other(folder, step, report_to)]
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
        # Also after a signal or a failure, which it may explain; a full disk has an error of its own.
        with contextlib.suppress(OSError):
            plot(path, folder / "training.png")


def _other(folder: Path, step: int, report_to: str | None) -> list[logging.Handler]:
    if report_to is None:
        report_to = "tensorboard" if find_spec("tensorboard") else "none"
    if report_to == "none":
        return []
    if report_to == "tensorboard":
        purge = step + 1 if step else None
        return [TensorBoardHandler(log_dir=folder, run_name="tensorboard", purge_step=purge)]
    handler = {"wandb": WandbHandler, "mlflow": MLFlowHandler, "trackio": TrackioHandler}[report_to]
    return [_Remote(handler(run_name=folder.resolve().parent.name, log_dir=folder), report_to)]


class _Remote(logging.Handler):
    """A logger whose server may be away: it must take the first record, and later costs no run its steps."""

    def __init__(self, sender: logging.Handler, name: str) -> None:
        super().__init__()
        self._sender, self._name = sender, name
        self._worked = self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sender.emit(record)
        except Exception as error:
            if not self._worked:
                raise StageError(
                    f"--report-to {self._name} takes no metrics: {type(error).__name__}: {error}. "
                    "Set it up, or pass --report-to none; metrics.jsonl is written in any case."
                ) from error
            self._tell(error)
        else:
            self._worked = True

    def close(self) -> None:
        try:
            self._sender.close()
        except Exception as error:
            self._tell(error)
        super().close()

    def _tell(self, error: Exception) -> None:
        if not self._told:
            _LOG.warning("%s lacks metrics from here on, metrics.jsonl has them: %s", self._name, error)
        self._told = True


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


# ----------------------------------------------------------------------------------------------------------
# Plot


def plot(metrics: Path, path: Path) -> None:
    """The loss of each step and its running median (left), held-out acceptance (right).

    Args:
        metrics: `metrics.jsonl`; without a training step there is no plot.
        path: the .png to write.
    """
    from matplotlib.figure import Figure

    rows = list(atomic_io.read_json_lines(metrics))
    losses = {row["step"]: row["train"]["loss"] for row in rows if "train" in row}
    measured = {row["step"]: row["held_out"] for row in rows if "held_out" in row}
    if not losses:
        return
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*losses.items(), strict=True), color="lightgrey", label="each step")
    left.plot(list(losses), _running_median(list(losses.values())), label=f"median of {_SMOOTH} steps")
    left.set(title="training loss", xlabel="step", ylabel="loss, sum over the draft's positions")
    left.legend()
    if measured:
        sources = list(next(iter(measured.values()))["by_source"])
        for name in sources if len(sources) > 1 else []:
            values = [row["by_source"][name] for row in measured.values()]
            right.plot(list(measured), values, marker=".", linewidth=1, label=name)
        values = [row["acceptance_length"] for row in measured.values()]
        right.plot(list(measured), values, marker="o", color="black", label="all")
        right.legend()
    right.set(title="held-out rows, offline", xlabel="step", ylabel="acceptance length")
    with atomic_io.replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _running_median(values: list[float]) -> list[float]:
    return [statistics.median(values[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(values))]
