"""The run around speculators' Trainer: steps, processes, signals, metrics."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common import atomic_io, manifest, processes, train_metrics, training
from common.acceptance import Acceptance
from common.errors import StageError
from common.training import Settings
from tests.conftest import ROOT, load_script

SETTINGS = Settings(
    lr=1e-3,
    epochs=3,
    max_steps=None,
    ttt_steps=3,
    optimizer="adamw",
    weight_decay=0.01,
    scheduler="cosine",
    warmup_ratio=0.0,
    save_every=100,
    keep_last=1,
    max_bad_steps=0,
)


class Packed:
    """A sampler whose epochs pack into 5, 4 and 6 batches, as another order of the same rows does."""

    def _generate_batches(self, epoch: int) -> list[list[int]]:
        return [[0]] * (5, 4, 6)[epoch]


class Loader:
    batch_sampler = Packed()


@pytest.mark.parametrize(
    ("epochs", "max_steps", "batches", "steps"),
    [
        *[(3, None, 1, 15), (2, None, 1, 9), (3, 7, 1, 7), (3, 5, 1, 5), (3, 99, 1, 15)],
        *[(3, None, 2, 8), (3, None, 4, 5), (1, None, 9, 1), (3, 4, 2, 4)],  # 3 + 2 + 3, 2 + 1 + 2
    ],
)
def test_steps_are_counted_epoch_by_epoch(
    epochs: int, max_steps: int | None, batches: int, steps: int
) -> None:
    settings = replace(SETTINGS, epochs=epochs, max_steps=max_steps, gradient_accumulation_steps=batches)
    assert training.count_steps(Loader(), settings) == steps  # type: ignore[arg-type]


def test_the_schedule_of_speculators_ends_at_the_last_step(tmp_path: Path) -> None:
    config = training.trainer_config(replace(SETTINGS, warmup_ratio=0.1), tmp_path, 50, torch.bfloat16)
    from speculators.train.trainer import _resolve_scheduler_steps

    assert _resolve_scheduler_steps(config, train_loader_len=1000) == (5, 50)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal: a shell's background job, and some CI, starts with it ignored."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("interruptible")
def test_the_first_signal_is_a_wish_and_the_second_acts() -> None:
    terminate = signal.getsignal(signal.SIGTERM)
    with training._stop_signals() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is terminate


def test_metrics_of_steps_that_go_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "train": {"loss": s}}) + "\n" for s in (1, 2, 3, 4)))
    logger = logging.getLogger("speculators.metrics")
    handlers = list(logger.handlers)
    with train_metrics.recording(tmp_path, step=2):
        train_metrics.held_out(2, {"a": Acceptance(4, (2, 1)), "b": Acceptance(4, (0, 0))})
        logger.info({"train": {"loss": 30.0}}, extra={"step": 3})
    assert list(atomic_io.read_json_lines(path)) == [
        {"step": 1, "train": {"loss": 1}},
        {"step": 2, "train": {"loss": 2}},
        {
            "step": 2,
            "held_out": {
                "acceptance_length": 1.375,
                "position_0": 0.25,
                "position_1": 0.125,
                "by_source": {"a": 1.75, "b": 1.0},
            },
        },
        {"step": 3, "train": {"loss": 30.0}},
    ]
    assert logger.handlers == handlers


def test_a_run_that_never_reached_a_checkpoint_begins_its_metrics_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with train_metrics.recording(tmp_path, step=0):
            train_metrics.held_out(0, {"a": Acceptance(4, (2, 1))})
    assert [row["step"] for row in atomic_io.read_json_lines(tmp_path / "metrics.jsonl")] == [0]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with train_metrics.recording(tmp_path, step=0):
        logging.getLogger("speculators.metrics").info({"train": {"loss": 2.5}}, extra={"step": 3})
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(3, 2.5)]


def test_another_logger_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package: what speculators' logger sends to it, and under which name."""
    sent: list[tuple[dict[str, float], int]] = []
    named: list[str] = []

    def init(*, name: str, **_: object) -> types.SimpleNamespace:
        named.append(name)
        return types.SimpleNamespace(log=lambda values, step: sent.append((values, step)))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with train_metrics.recording(tmp_path / "run" / "checkpoints", step=0, report_to="wandb"):
        train_metrics.trained(3, {"loss": 2.5})
        train_metrics.held_out(3, {"a": Acceptance(4, (2,))})
    assert named == ["run"]
    assert sent[0] == ({"train/loss": 2.5}, 3)
    assert sent[1][0]["held_out/acceptance_length"] == 1.5
    assert not (tmp_path / "run" / "checkpoints" / "tensorboard").exists()


def test_a_logger_must_work_at_first_and_may_fail_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def log(_: object, step: int) -> None:
        if step == 2:
            raise ConnectionError("the server is away")
        taken.append(step)

    wandb = types.SimpleNamespace(init=lambda **_: types.SimpleNamespace(log=log))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with train_metrics.recording(tmp_path, step=0, report_to="wandb"):
        for step in (1, 2, 3):
            train_metrics.trained(step, {"loss": 2.5})
    assert taken == [1, 3]
    assert [row["step"] for row in atomic_io.read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with (
        pytest.raises(StageError, match=r"--report-to wandb takes no metrics: ConnectionError: the server"),
        train_metrics.recording(tmp_path, step=0, report_to="wandb"),
    ):
        train_metrics.trained(2, {"loss": 2.5})


def test_one_process_decides_for_itself() -> None:
    assert processes.main_decides(lambda: 7) == 7

    def fail() -> None:
        raise StageError("no")

    with pytest.raises(StageError, match="no"):
        processes.main_decides(fail)


@pytest.mark.parametrize("how", ["--no-load-test", "--fsdp"], ids=["ddp", "fsdp"])
def test_two_processes_train_one_drafter_and_measure_as_one(
    how: str, captured_run: Path, public_head: Path, tmp_path: Path
) -> None:
    """gloo: the import's acceptance over two halves of the held-out rows is that of one process."""
    flags = ["--data-from", str(captured_run), "--finetune-from", str(public_head)]
    flags += ["--draft-vocab", "checkpoint", "--total-seq-len", "512", "--eval-ratio", "0.2", "--lr", "1e-4"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    dry = ["--run-dir", str(tmp_path / "dry"), *flags, "--dry-run", "--report-json", str(one)]
    assert load_script("04_train").main(dry) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    wet = ["04_train.py", "--run-dir", str(tmp_path / "run"), *flags, "--report-json", str(two)]
    done = subprocess.run(
        [*torchrun, *wet, "--max-steps", "2", how],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(two.read_text()) == json.loads(one.read_text())
    made = manifest.read(tmp_path / "run" / "drafter", "04_train.py")
    assert made.counts["steps"] == 2
    assert done.stderr.count("drafter: done") == 1
    if how == "--fsdp" and importlib.util.find_spec("vllm"):
        assert done.stderr.count("drafter: loads in vLLM") == 1
    rows = atomic_io.read_json_lines(tmp_path / "run" / "checkpoints" / "metrics.jsonl")
    assert [row["step"] for row in rows if "train" in row] == [1, 2]
