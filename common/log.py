"""What the user sees while a stage runs: log lines, bars that are silent outside a terminal, human units."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm


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
    """A tqdm bar with rate and remaining time on stderr, silent when stderr is no terminal."""
    return tqdm(total=total, unit=f" {unit}", desc=description, initial=initial, disable=None, **kwargs)


def human_bytes(count: float) -> str:
    """`57344` -> `57.3kB` (powers of 1000, as disks are sold)."""
    return tqdm.format_sizeof(count, "B", 1000)


def human_count(count: float) -> str:
    """`1420909` -> `1.42M`; below 1000 as it is."""
    return str(int(count)) if count < 1000 else tqdm.format_sizeof(count)


def human_seconds(seconds: float) -> str:
    """`3725` -> `1:02:05`."""
    return tqdm.format_interval(seconds)
