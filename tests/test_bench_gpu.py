"""bench/gpu.py, which no machine of this project has run yet: its path at a tiny shape, and without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import gpu
from bench.train_step import Shape
from common import processes

TINY = Shape("tiny", 32, 64, 2, 2, 16, 512, 128)


def test_gpu_without_a_gpu_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu.main()
    assert "no CUDA device is visible, so nothing was measured" in capsys.readouterr().out


def test_gpus_path_runs_at_a_tiny_shape() -> None:
    device, _ = processes.start("cpu")
    peak = gpu.product_rate(device, 64)
    lines = [
        *gpu.step_lines(TINY, 5, torch.float32, 64, peak),
        *gpu.memory_lines(TINY, torch.float32, 64),
        *gpu.store_lines(TINY.hidden, device, rows=2, tokens=16),
    ]
    assert len(lines) == 2 + 2 + 1 + 2 * 6
    assert all(line.ratio.median > 0 for line in lines)


def test_a_steps_operations_are_counted_by_the_formula() -> None:
    # q, k, v and o: 16 x (2 x (2 + 2 x 2) + 2) x 32 = 7168; mlp 3 x 32 x 64 = 6144; head 32 x 128 = 4096;
    # fc 3 x 32 x 32 = 3072. 10 tokens x (6 x 3 passes x (7168 + 6144 + 4096) + 4 x 3072 + 2 x 4096)
    assert gpu.flops(TINY, tokens=10, ttt_steps=3) == 3_338_240
