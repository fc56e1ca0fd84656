"""Processes over a stream: in order, few items at a time, and a killed one is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import workers
from common.errors import StageError
from tests.conftest import ROOT


def _square(number: int) -> int:
    return number * number


def _die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_order_and_the_stream_is_drawn_as_needed(count: int) -> None:
    drawn = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    with workers.parallel(count) as parallel:
        results = parallel(_square, numbers())
        assert [next(results) for _ in range(10)] == [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]
        assert len(drawn) <= 10 + 2 * count


def test_what_is_under_way_is_bounded_in_bytes_however_many_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_WINDOW_BYTES", 3000)
    drawn = []

    def texts() -> Iterator[bytes]:
        for number in range(40):
            drawn.append(number)
            yield bytes([number]) * 1000

    with workers.parallel(16) as parallel:
        results = parallel(len, texts())
        assert next(results) == 1000
        assert len(drawn) == 3  # two under way with some bytes of pickle each, and the one that waits
        assert list(results) == [1000] * 39


def test_a_killed_worker_is_told_with_what_to_do() -> None:
    with pytest.raises(StageError, match="fewer --workers"):
        with workers.parallel(2) as parallel:
            list(parallel(_die, range(3)))


# A process of its own, as the first call of one decides what is loaded.
_PRELOADED = """
import sys
from common import workers

def loaded(name):
    return name in sys.modules

if __name__ == "__main__":
    with workers.parallel(2, preload=["numpy"]) as parallel:
        print(list(parallel(loaded, ["numpy", "numpy", "torch"])), "numpy" in sys.modules)
"""


def test_what_all_workers_need_is_there_when_they_begin(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_PRELOADED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[True, True, False] False\n", done.stderr
