"""Workers and prefetched batches, out of the size of a batch and the shared memory there is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common import loader_memory
from common.errors import InputError
from common.loader_memory import Reading
from common.loaders import TrainingRows
from tests.test_loaders import opened, write_run

KIMI = {"tokens": 4096, "token_bytes": 4 * 7168 * 2 + 32}  # 235 MB a batch


def test_bytes_of_a_token_are_its_states_and_four_integers(tmp_path: Path) -> None:
    rows: TrainingRows = opened(write_run(tmp_path, [(one, "s", 4, [2]) for one in "abc"]))
    assert rows.token_bytes(torch.bfloat16) == 4 * 8 * 2 + 32


@pytest.mark.parametrize(
    ("gigabytes", "processes", "workers", "prefetch"),
    [
        (100, 1, 4, 4),  # 2 loaders x 4 workers x 4 batches: 7.5 GB
        (5, 1, 4, 2),  # 10 batches a loader
        (1, 1, 2, 1),  # 2 batches a loader
        (0.064, 1, 0, 4),  # what a container has by default
        (60, 8, 4, 3),  # 7.5 GB a process is just too little for four each
    ],
)
def test_what_is_read_ahead_fits(
    gigabytes: float, processes: int, workers: int, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    found = Reading.fit(**KIMI, workers=None, default=4, limit=gigabytes * 1e9)
    assert (found.workers, found.prefetch) == (workers, prefetch)


def test_workers_that_were_asked_for_are_refused_where_they_do_not_fit() -> None:
    assert Reading.fit(**KIMI, workers=8, default=4, limit=8e9).prefetch == 2
    with pytest.raises(
        InputError, match=r"--num-workers 8: with one batch each.* = 3\.76GB of shared memory"
    ):
        Reading.fit(**KIMI, workers=8, default=4, limit=3e9)


def test_the_memory_is_shown_with_its_formula(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stage.loader_memory"):
        Reading.fit(**KIMI, workers=2, default=4, limit=1e9).describe()
        Reading.fit(**KIMI, workers=0, default=4, limit=1e9).describe()
    assert caplog.messages == [
        "loader memory: 1 processes x 2 loaders x 2 workers x 1 batches x 4096 tokens x 57376 bytes "
        "= 940MB of 1.00GB",
        "loader memory: none, the training process reads its batches itself",
    ]


def test_the_default_is_half_of_what_shared_memory_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_memory, "_SHARED", tmp_path)
    usage = type("Usage", (), {"free": 64e6})
    monkeypatch.setattr(
        loader_memory.shutil, "disk_usage", lambda folder: usage if folder == tmp_path else None
    )
    assert Reading.fit(tokens=512, token_bytes=5000, workers=None, default=4, limit=None).limit == 32e6
