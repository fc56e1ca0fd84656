"""What the user sees while a stage runs: log lines, bars that are lines outside a terminal, human units."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from typing import Any

from tqdm import tqdm

_TELL_EVERY_S = 60.0


def setup(level: int = logging.INFO) -> None:
    """One plain line a record on stderr; third-party chatter only with `--debug`."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger("stage").setLevel(level)
    if level == logging.DEBUG:
        logging.getLogger().setLevel(logging.INFO)


def get(name: str) -> logging.Logger:
    """The logger of a module or script; all of ours hang below `stage`."""
    return logging.getLogger(f"stage.{name}")


def bar(total: int | None = None, *, unit: str, description: str, initial: int = 0, **kwargs: Any) -> tqdm:
    """A tqdm bar with rate and remaining time on stderr, a log line a minute when stderr is no terminal.

    Of torchrun's processes only the first one draws.
    """
    kwargs |= {"disable": os.environ.get("RANK", "0") != "0"}
    kind = tqdm if sys.stderr.isatty() else _Lines
    return kind(total=total, unit=f" {unit}", desc=description, initial=initial, **kwargs)


class _Lines(tqdm):
    """Shows itself as log lines: `answers: 120/5000 prompts, 2.31 prompts/s, 35:12 left`."""

    def __init__(self, **kwargs: Any) -> None:
        self._told = time.monotonic()
        form = "{desc}: {n_fmt}/{total_fmt}{unit}, {rate_fmt}, {remaining} left{postfix}"
        super().__init__(bar_format=form, file=io.StringIO(), **kwargs)

    def display(self, *_: Any, **__: Any) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            get("progress").info("%s", self)


def human_bytes(count: float) -> str:
    """`57344` -> `57.3kB` (powers of 1000, as disks are sold)."""
    return tqdm.format_sizeof(count, "B", 1000)


def human_count(count: float) -> str:
    """`1420909` -> `1.42M`; below 1000 as it is."""
    return str(int(count)) if count < 1000 else tqdm.format_sizeof(count)


def human_seconds(seconds: float) -> str:
    """`3725` -> `1:02:05`."""
    return tqdm.format_interval(seconds)
