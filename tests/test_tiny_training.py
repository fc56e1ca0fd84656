"""Step by step: known losses, accumulated batches, time limit, anchor, schedules, kill -9, reports."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common import dataset, loaders, processes, train_guards, training
from common.errors import StageError
from common.loaders import HeldOut
from tests import tiny_training
from tests.conftest import ROOT
from tests.tiny_training import DAYS, SETTINGS, K, run, steps, trainer
from tests.two_processes import SHARED, STEPS

# 22 tokens of a row in batches of 64: 16 trained rows, three in most batches.
LENGTHS = [18 + number % 5 for number in range(18)]
# Six steps of the fixture below, in float32, on a Zen 4.
KNOWN_LOSSES = [55.8826, 54.3428, 64.6441, 61.5998, 63.3633, 56.6313]


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> None:
    if not torch.cuda.is_available():
        processes.start("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_training.make(tmp_path_factory.mktemp("tiny"), LENGTHS)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / str(step) / "model.safetensors")


def rates(out: Path) -> list[float]:
    return [step["lr"] for step in steps(out)]


def test_losses_of_a_fixed_run_are_known(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, replace(SETTINGS, epochs=1))
    assert [step["loss"] for step in steps(tmp_path)] == pytest.approx(KNOWN_LOSSES, rel=1e-4)


def test_an_accumulated_step_is_the_mean_of_its_batches_by_hand(data: Path, tmp_path: Path) -> None:
    made = trainer(data, tmp_path, replace(SETTINGS, gradient_accumulation_steps=2, max_steps=1))
    model = copy.deepcopy(made.drafter)
    batches = list(made.train_loader)[:2]
    made.run({})
    gradients: dict[str, torch.Tensor] = {}
    for batch in batches:
        model.zero_grad()
        inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        model(**inputs, **made.config.train_call_kwargs)[1].backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad / 2
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert steps(tmp_path)[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name in gradients:
            # AdamW's first step: moments are 0.1 g and 0.001 g^2, both corrected to g and g^2.
            clipped = gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
            decayed = parameter.detach() * (1 - 1e-2 * 0.01)
            wanted = decayed - 1e-2 * clipped / (clipped.abs() + 1e-8)
            torch.testing.assert_close(weights(tmp_path, 1)[name], wanted, rtol=1e-5, atol=1e-6)


def test_two_accumulated_batches_are_one_of_twice_the_size(tmp_path: Path) -> None:
    """Rows of one length: two in a batch, or one in each of two."""
    pair = tiny_training.make(tmp_path, [32, 32, 32])
    settings = replace(SETTINGS, epochs=1)
    run(pair, tmp_path / "large", settings, total_seq_len=64)
    run(pair, tmp_path / "small", replace(settings, gradient_accumulation_steps=2), total_seq_len=32)
    (large,), (small,) = steps(tmp_path / "large"), steps(tmp_path / "small")
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-6)
    assert small["grad_norm"] == pytest.approx(large["grad_norm"], rel=1e-5)


def test_kill_9_between_the_batches_of_a_step_resumes_the_undisturbed_run(data: Path, tmp_path: Path) -> None:
    """At a random batch, with accumulation and an anchor, of a run of 2 x 3 steps of two batches."""
    whole = run(data, tmp_path / "whole", DAYS)
    at = random.randrange(4, 11)
    argv = [sys.executable, "-m", "tests.tiny_training", str(data), str(tmp_path / "killed"), str(at)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(steps(tmp_path / "killed")) == at // 2
    resumed = run(data, tmp_path / "killed", DAYS)
    assert (resumed.steps, resumed.best_step, resumed.best) == (6, whole.best_step, whole.best), at
    assert len(steps(tmp_path / "killed")) == 6
    kept = ("epoch", "loss", "lr", "grad_norm")
    for one, other in zip(steps(tmp_path / "whole"), steps(tmp_path / "killed"), strict=True):
        assert {name: one[name] for name in kept} == {name: other[name] for name in kept}, at
    for name, tensor in weights(tmp_path / "whole", 6).items():
        assert torch.equal(tensor, weights(tmp_path / "killed", 6)[name]), (at, name)


def test_a_time_limit_ends_the_run_and_its_schedule_between_two_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which each step takes 10 s; 35 s of a run that would have twelve steps."""
    settings = replace(SETTINGS, max_time=35.0)
    made = trainer(data, tmp_path, settings)
    ticks = itertools.count(1000.0, 10.0)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", clock)
    outcome = made.run({})
    assert made.total_steps == 12
    assert outcome.steps == 4
    assert json.loads((tmp_path / "4" / "training_state.json").read_text())["seconds"] == 40.0
    # Cosine over the share of the time, 0, 10, 20 and 30 of 35 s: ahead of the share of the steps.
    assert rates(tmp_path) == pytest.approx([1e-2, 8.1174e-3, 3.8874e-3, 4.9516e-4], rel=1e-4)


def test_no_step_begins_where_a_measure_has_used_the_time_up(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which each step and each measure takes 10 s; 35 s: two steps and two measures."""
    made = trainer(data, tmp_path, replace(SETTINGS, max_time=35.0, save_every=1))
    ticks = itertools.count(1000.0, 10.0)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", clock)
    assert made.run({}).steps == 2


def test_a_run_whose_time_is_up_is_finished_and_not_trained_on(data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_time=1e-9)
    assert run(data, tmp_path, settings).steps == 1
    again = trainer(data, tmp_path, settings)
    assert again.seconds > 0
    assert again.run({}).steps == 1


def test_a_constant_rate_comes_after_the_warm_up_also_of_a_resumed_run(data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, scheduler="constant", warmup_ratio=0.34, epochs=1, save_every=1)
    made = trainer(data, tmp_path, settings)
    made._agree = lambda _: made.global_step == 2  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.run({})
    run(data, tmp_path, settings)
    assert rates(tmp_path) == pytest.approx([0.0, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2])


def test_muon_and_adamw_beside_it_resume_bit_by_bit(data: Path, tmp_path: Path) -> None:
    """Two optimizers and two schedules: muon has the matrices, adamw the head and the norms."""
    settings = replace(SETTINGS, optimizer="muon", epochs=1, max_steps=4)
    run(data, tmp_path / "whole", settings)
    made = trainer(data, tmp_path / "stopped", settings)
    assert len(made.optimizers) == 2
    made._agree = lambda _: made.global_step == 2  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.run({})
    run(data, tmp_path / "stopped", settings)
    whole, stopped = steps(tmp_path / "whole"), steps(tmp_path / "stopped")
    assert [(step["loss"], step["lr"]) for step in whole] == [(step["loss"], step["lr"]) for step in stopped]
    for name, tensor in weights(tmp_path / "whole", 4).items():
        assert torch.equal(tensor, weights(tmp_path / "stopped", 4)[name]), name


def test_the_anchor_holds_weights_near_their_start(data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=1)
    start = {
        name: p.detach().clone() for name, p in trainer(data, tmp_path, settings).drafter.named_parameters()
    }
    moved = {}
    for name, strength in (("free", 0.0), ("held", 50.0)):
        run(data, tmp_path / name, replace(settings, anchor=strength))
        last = weights(tmp_path / name, 6)
        moved[name] = sum((last[n] - start[n]).square().sum().item() for n in last if n in start)
    assert moved["held"] < 0.5 * moved["free"]


def test_an_exploding_loss_is_reported_with_its_rows(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train_guards, "_FEWEST", 2)
    monkeypatch.setattr(train_guards, "_EXPLODED", 1.0)
    made = trainer(data, tmp_path, replace(SETTINGS, epochs=1))
    packed = [rows.tolist() for rows in made.train_loader.batch_sampler._generate_batches(0)]
    monkeypatch.setattr(logging.getLogger("stage"), "propagate", True)
    with caplog.at_level(logging.WARNING, "stage.training"):
        made.run({})
    losses = [step["loss"] for step in steps(tmp_path)]
    told = [record.getMessage() for record in caplog.records if "running median" in record.getMessage()]
    above = [s for s in range(2, 6) if losses[s] > sorted(losses[:s])[s // 2]]
    assert told
    assert above
    row = packed[above[0]][0]
    assert any(
        f"loss {losses[above[0]]:.3f}" in text and f"row {row} ({row:04d}#0, " in text for text in told
    )


def test_metrics_tell_the_wait_and_the_run_leaves_a_plot(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path, replace(SETTINGS, max_steps=2))
    assert all(0 <= step["wait_share"] < 1 for step in steps(tmp_path))
    assert steps(tmp_path)[0]["wait_share"] == 0  # the first batch of an epoch is not counted
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_no_number_skips_its_step_also_where_the_gradient_is_finite(
    data: Path, tmp_path: Path
) -> None:
    """NaN as a summand of the second batch's loss, which no gradient shows."""
    settings = replace(
        SETTINGS, gradient_accumulation_steps=2, max_steps=2, save_every=1, max_bad_steps=1, warmup_ratio=0.0
    )
    made = trainer(data, tmp_path, settings)
    start = {name: p.detach().clone() for name, p in made.drafter.named_parameters()}
    forward, added = made.model.forward, iter([0.0, float("nan"), 0.0, 0.0])

    def spoilt(*args: object, ttt_steps: int, **inputs: object) -> object:
        found = forward(*args, ttt_steps=ttt_steps, **inputs)
        return (found[0], found[1] + next(added), found[2]) if made.model.training else found

    made.model.forward = spoilt
    outcome = made.run({})
    assert (outcome.steps, outcome.bad_steps) == (2, 1)
    assert math.isfinite(steps(tmp_path)[0]["grad_norm"])
    for name, tensor in weights(tmp_path, 1).items():
        assert name not in start or torch.equal(tensor, start[name]), name
    assert not torch.equal(weights(tmp_path, 2)["fc.weight"], start["fc.weight"])


def test_a_bad_step_names_its_rows_of_all_batches(data: Path, tmp_path: Path) -> None:
    made = trainer(data, tmp_path, replace(SETTINGS, gradient_accumulation_steps=2))
    packed = made.train_loader.batch_sampler._generate_batches(0)
    with torch.no_grad():
        made.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(StageError, match="1 steps had no finite loss or gradient") as error:
        made.run({})
    for row in (packed[0][0], packed[1][0]):
        assert f"row {row} ({row:04d}#0, {'ab'[row % 2]})" in str(error.value)


@pytest.fixture(scope="module")
def two_processes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two gloo processes, each with two batches a step."""
    out = tmp_path_factory.mktemp("two")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*argv, "-m", "tests.two_processes", str(data), str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same batches in one process, four a step."""
    out = tmp_path_factory.mktemp("one")
    made = trainer(data, out, replace(SHARED, gradient_accumulation_steps=4))
    sampler = made.train_loader.batch_sampler
    batches = []
    for rank in (0, 1):
        sampler.num_replicas, sampler.rank, sampler._cached_generated_batches = 2, rank, (-1, [])
        batches.append(sampler._generate_batches(0))
    interleaved = [batch for pair in zip(*batches, strict=True) for batch in pair]
    sampler._cached_generated_batches = (0, interleaved)
    assert made.run({}).steps == STEPS
    return out


@pytest.mark.parametrize("how", ["ddp", "fsdp", "ddp-fsdp", "fsdp-ddp"])
def test_two_processes_reach_the_loss_and_the_weights_of_one(
    how: str, one_process: Path, two_processes: Path
) -> None:
    """Whole and sharded, and where one kind takes up what the other left."""
    for one, other in zip(steps(one_process), steps(two_processes / how), strict=True):
        for name in ("loss", "loss_0", "loss_1", "loss_2", "grad_norm", "lr"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
    wanted, found = weights(one_process, STEPS), weights(two_processes / how, STEPS)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_sharded_checkpoints_are_the_files_of_whole_ones(two_processes: Path) -> None:
    path = "optimizer_state_dict.pt"
    whole, sharded = (
        torch.load(two_processes / how / str(STEPS) / path, weights_only=True) for how in ("ddp", "fsdp")
    )
    for one, other in zip(whole["param_groups"], sharded["param_groups"], strict=True):
        names = [name.removeprefix("module.") for name in one["param_names"]]  # DDP's wrapper
        assert other == one | {"param_names": names}
    assert sharded["state"].keys() == whole["state"].keys()
    for number, moments in whole["state"].items():
        for name, moment in moments.items():
            assert sharded["state"][number][name].dtype == moment.dtype
            torch.testing.assert_close(sharded["state"][number][name], moment, rtol=1e-4, atol=1e-6)


def test_acceptance_by_source_is_that_of_a_slow_loop_over_positions(data: Path, tmp_path: Path) -> None:
    """On rows that were learnt by heart, where there is something to count, packed by three and shuffled."""
    made = trainer(data, tmp_path, replace(SETTINGS, epochs=8, save_every=999, keep_last=1))
    made.run({})
    model, rows = made.drafter.eval(), made.held_out.rows
    lm_head = made.held_out.verifier.tensor("lm_head").float()
    counted = {"a": [0] * (1 + K), "b": [0] * (1 + K)}
    single = loaders.single_rows(rows.store, dataset.load(rows.folder), [0, 1, 2])
    for row, batch in zip(range(rows.boundary), single, strict=False):
        states = batch.pop("verifier_last_hidden_states")[0]
        with torch.no_grad():
            chosen = (model.verifier_norm(states) @ lm_head.T).argmax(-1).tolist()
            drafted = [model.d2t[tokens[0]] + tokens[0] for tokens in model(**batch, ttt_steps=K)]
        supervised = batch["loss_mask"][0].tolist()
        for start in range(len(supervised) - K + 1):
            if not all(supervised[start : start + K]):
                continue
            right = 0
            while right < K and drafted[right][start] == chosen[start + right]:
                right += 1
            for column in range(1 + right):
                counted["ab"[row % 2]][column] += 1
    made.train_loader.batch_sampler.set_epoch(0)  # held-out rows have one order
    again = HeldOut(rows, made.train_loader, made.held_out.verifier, K).by_source(model)
    assert {name: [part.drafts, *part.accepted] for name, part in again.items()} == counted
    assert all(drafts > first > second > 0 for drafts, first, second, _ in counted.values())
