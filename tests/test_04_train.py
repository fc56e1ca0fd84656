"""04 on real states: what it writes, resumes, refuses and reports. The drafter is tiny, all else is real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import atomic_io, load_test, manifest
from tests.conftest import ROOT, load_script

TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "32", "--intermediate-size", "64"]
# vLLM loads the result in one test; each such load takes ten seconds.
SHORT = [
    "--no-load-test",
    "--total-seq-len",
    "256",
    "--eval-ratio",
    "0.1",
    "--lr",
    "1e-3",
    "--epochs",
    "2",
    "--max-steps",
    "7",
]
# bfloat16 on a Zen 4; float32 is within 0.2 % of these.
KNOWN_LOSSES = [20.2913, 17.5943, 22.4187, 15.0918, 18.7516, 15.1931, 18.6501]
PUBLIC = ["--draft-vocab", "checkpoint", "--total-seq-len", "512", "--eval-ratio", "0.1"]


@pytest.fixture(scope="module")
def source(captured_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder to read from: the shared rows and states, and a draft vocabulary of 512."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("dataset", "hidden_states"):
        (folder / name).symlink_to(captured_run / name)
    assert (
        load_script("02_build_vocab_map").main(["--run-dir", str(folder), "--draft-vocab-size", "512"]) == 0
    )
    return folder


def train(run: Path, source: Path, *flags: str) -> int:
    argv = ["--run-dir", str(run), "--data-from", str(source), *TINY, *SHORT, "--save-every", "3", *flags]
    return load_script("04_train").main(argv)


def metrics(run: Path, kind: str) -> dict[int, dict[str, object]]:
    rows = atomic_io.read_json_lines(run / "checkpoints" / "metrics.jsonl")
    return {row["step"]: row[kind] for row in rows if kind in row}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / str(step) / "model.safetensors")


def require_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, losses, rates and acceptance of both runs are equal to the last bit."""
    for name, tensor in weights(one, 7).items():
        assert torch.equal(tensor, weights(other, 7)[name]), name
    path = "checkpoints/7/optimizer_state_dict.pt"
    states = [torch.load(run / path, weights_only=True)["state"] for run in (one, other)]
    for key, state in states[0].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, states[1][key][name]), (key, name)
    assert metrics(one, "held_out") == metrics(other, "held_out")
    kept = ("loss", "lr", "grad_norm", "epoch")
    for step, row in metrics(one, "train").items():
        assert {k: row[k] for k in kept} == {k: metrics(other, "train")[step][k] for k in kept}
    assert len(metrics(other, "train")) == 7


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    assert train(run, source) == 0
    return run


def test_a_run_leaves_checkpoints_metrics_and_a_drafter(undisturbed: Path) -> None:
    steps = sorted(path.name for path in (undisturbed / "checkpoints").iterdir() if path.name.isdigit())
    assert steps[-1] == "7"
    assert len(steps) <= 3  # the two newest, and the best where it is older
    losses = metrics(undisturbed, "train")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6, 7]
    assert losses[7]["loss"] < losses[1]["loss"]
    assert sorted(metrics(undisturbed, "held_out")) == [0, 3, 6, 7]
    assert (undisturbed / "checkpoints" / "training.png").read_bytes().startswith(b"\x89PNG")
    made = manifest.read(undisturbed / "drafter", "04_train.py")
    assert made.counts["read"] == 40
    assert made.counts["written"] == 36
    assert made.counts["dropped"] == {"held_out": 4, "no_supervised_token": 0}
    assert made.counts["steps"] == 7
    assert made.facts["layer_ids"] == [2, 15, 27]
    assert set(made.inputs) == {"dataset", "hidden_states", "vocab"}
    config = json.loads((undisturbed / "drafter" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["norm_before_residual"] is False
    stored = load_file(undisturbed / "drafter" / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.bfloat16


def test_the_drafter_is_the_best_checkpoint(undisturbed: Path) -> None:
    best = (undisturbed / "checkpoints" / "checkpoint_best").resolve().name
    lengths = {
        step: row["acceptance_length"] for step, row in metrics(undisturbed, "held_out").items() if step
    }
    assert lengths[int(best)] == max(lengths.values())
    stored = load_file(undisturbed / "drafter" / "model.safetensors")
    assert torch.equal(stored["fc.weight"], weights(undisturbed, int(best))["fc.weight"].bfloat16())


def test_masters_and_moments_are_float32_and_use_it(undisturbed: Path) -> None:
    trained = weights(undisturbed, 7)
    assert {t.dtype for t in trained.values() if t.is_floating_point()} == {torch.float32}
    assert not torch.equal(trained["fc.weight"], trained["fc.weight"].bfloat16().float())
    state = torch.load(undisturbed / "checkpoints/7/optimizer_state_dict.pt", weights_only=True)["state"]
    assert {t.dtype for one in state.values() for t in one.values()} == {torch.float32}


def test_the_schedule_ends_at_max_steps(undisturbed: Path) -> None:
    rates = [row["lr"] for _, row in sorted(metrics(undisturbed, "train").items())]
    # Cosine over 7 steps without a warm-up step (5 % of 7): 1e-3 x (1 + cos(pi s / 7)) / 2.
    wanted = [1e-3, 9.5048e-4, 8.1174e-4, 6.1126e-4, 3.8874e-4, 1.8826e-4, 4.9516e-5]
    assert rates == pytest.approx(wanted, rel=1e-4)


def test_losses_of_the_run_are_the_known_ones(undisturbed: Path) -> None:
    losses = [row["loss"] for _, row in sorted(metrics(undisturbed, "train").items())]
    assert losses == pytest.approx(KNOWN_LOSSES, rel=5e-3)


def test_a_finished_run_is_recognised(
    undisturbed: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (undisturbed / "drafter" / "manifest.json").read_bytes()
    assert train(undisturbed, source) == 0
    assert (undisturbed / "drafter" / "manifest.json").read_bytes() == before


def test_kill_9_and_resume_give_the_undisturbed_run(undisturbed: Path, source: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    argv = [sys.executable, "04_train.py", "--run-dir", str(run), "--data-from", str(source)]
    threads = str(torch.get_num_threads())
    process = subprocess.Popen(
        [*argv, *TINY, *SHORT, "--save-every", "3"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = run / "checkpoints" / "metrics.jsonl"
    # Step 4 or later: a checkpoint (3) and at least one step after it, which is lost.
    wait_until(lambda: log.exists() and '"step": 4' in log.read_text(), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (run / "drafter" / "manifest.json").exists()
    assert train(run, source, "--resume") == 0
    require_same_run(undisturbed, run)


def wait_until(ready, process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_saves_the_step_and_exits_130(undisturbed: Path, source: Path, tmp_path: Path) -> None:
    run = tmp_path / "terminated"
    log = run / "checkpoints" / "metrics.jsonl"

    def terminate() -> None:
        while not (log.exists() and '"step": 4' in log.read_text()):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    code = train(run, source)
    thread.join()
    assert code == 130
    steps = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()]
    assert 4 <= max(steps) <= 6
    assert (run / "checkpoints" / "training.png").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(run, source) == 0
    require_same_run(undisturbed, run)


def test_other_settings_are_refused_and_no_resume_starts_again(source: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    assert train(run, source, "--max-steps", "1") == 0
    kept = (run / "drafter" / "model.safetensors").read_bytes()
    assert train(run, source, "--max-steps", "1", "--lr", "2e-3") == 2
    error = capsys.readouterr().err
    assert "--lr was 0.001, now 0.002" in error
    assert "--overwrite" in error
    # A wrong start must not cost the old drafter.
    assert train(run, source, "--overwrite", "--finetune-from", str(tmp_path / "nowhere")) != 0
    assert (run / "drafter" / "model.safetensors").read_bytes() == kept
    assert train(run, source, "--max-steps", "2", "--overwrite") == 0
    assert manifest.read(run / "drafter", "04_train.py").counts["steps"] == 2
    assert sorted(metrics(run, "train")) == [1, 2]


def test_checkpoints_of_other_settings_are_not_taken_up(source: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    assert train(run, source, "--max-steps", "1") == 0
    shutil.rmtree(run / "drafter")
    assert train(run, source, "--max-steps", "2") == 2
    assert "checkpoints holds a run with other settings" in capsys.readouterr().err
    state = run / "checkpoints" / "1" / "training_state.json"
    state.write_text(state.read_text().replace('"processes": 1', '"processes": 8'))
    assert train(run, source, "--max-steps", "1") == 2
    assert "was written by 8 processes, these are 1" in capsys.readouterr().err
    assert train(run, source, "--max-steps", "2", "--no-resume") == 0
    assert sorted(metrics(run, "train")) == [1, 2]


def test_a_failed_start_can_be_followed_by_other_settings(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, source, "--finetune-from", str(tmp_path / "nowhere")) != 0
    assert train(run, source, "--max-steps", "1") == 0


def test_a_drafter_that_vllm_refuses_is_not_finished(
    source: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Only vLLM's answer is made up; see test_load_test.py for what it says of real folders."""
    run = tmp_path / "run"
    flags = ["--max-steps", "1", "--revision", "v1"]
    answer = {"version": "0", "tensors": {}, "failed": "ValueError: Unknown RoPE scaling type spiral"}
    with monkeypatch.context() as faulty:
        faulty.setattr(load_test, "_ask_vllm", lambda *_: answer)
        assert train(run, source, *flags, "--load-test") == 1
    error = capsys.readouterr().err
    assert "does not load in vLLM 0 as it was trained: vLLM: ValueError: Unknown RoPE scaling type" in error
    assert not (run / "drafter" / manifest.NAME).exists()
    # Without a new step, once the cause is mended.
    assert train(run, source, *flags) == 0
    assert sorted(metrics(run, "train")) == [1]
    config = json.loads((run / "drafter" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 100000.0,
    }
    assert config["speculators_config"]["verifier"]["name_or_path"].endswith("smollm2-135m-instruct")
    assert config["verifier_revision"] == "v1"


def test_dry_run_of_the_public_head_reports_and_writes_nothing_else(
    source: Path, public_head: Path, tmp_path: Path
) -> None:
    run, report = tmp_path / "run", tmp_path / "report.json"
    flags = ["--run-dir", str(run), "--data-from", str(source), "--finetune-from", str(public_head), *PUBLIC]
    assert load_script("04_train").main([*flags, "--dry-run", "--report-json", str(report)]) == 0
    assert not run.exists()
    found = json.loads(report.read_text())
    assert found["layout"] == "specforge"
    assert found["draft_vocab"] == {"kept": 4096, "new": 0, "dropped": 0}
    assert {line["status"] for line in found["tensors"]} == {"transferred", "filled from verifier"}
    assert set(found["tensors"][0]) == {"name", "source", "status", "reason"}
    step0 = found["step0"]
    assert step0["acceptance_length"] == pytest.approx(1 + sum(step0["by_position"]))
    assert 1.2 < step0["acceptance_length"] < 1.5
    assert 0.15 < step0["by_position"][0] < 0.4


def test_the_report_is_written_also_where_the_step_0_gate_stops_the_run(
    source: Path, public_head: Path, tmp_path: Path, capsys
) -> None:
    run, report = tmp_path / "run", tmp_path / "report.json"
    flags = ["--run-dir", str(run), "--data-from", str(source), "--finetune-from", str(public_head), *PUBLIC]
    gate = ["--min-step0-acceptance", "0.9", "--report-json", str(report)]
    assert load_script("04_train").main([*flags, *gate]) == 1
    assert "0.9" in capsys.readouterr().err
    found = json.loads(report.read_text())
    assert 0.15 < found["step0"]["by_position"][0] < 0.4
    assert found["draft_vocab"] == {"kept": 4096, "new": 0, "dropped": 0}
    assert not (run / "checkpoints").exists()


def test_lm_head_trains_unless_it_is_told_not_to(undisturbed: Path, source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, source, "--max-steps", "1", "--no-train-lm-head") == 0
    frozen = weights(run, 1)["lm_head.weight"]
    embedding = weights(run, 1)["embed_tokens.weight"]  # SmolLM2 is tied: the head's first rows are these
    token_ids = torch.nonzero(weights(run, 1)["t2d"]).flatten()
    assert torch.equal(frozen, embedding[token_ids])
    assert not torch.equal(weights(undisturbed, 7)["lm_head.weight"], frozen)
    assert torch.equal(weights(undisturbed, 7)["embed_tokens.weight"], embedding)


@pytest.fixture
def own_states(source: Path, tmp_path: Path) -> Path:
    """Like `source`, with states that a test may spoil."""
    folder = tmp_path / "spoilt"
    folder.mkdir()
    (folder / "dataset").symlink_to((source / "dataset").resolve())
    shutil.copytree(source / "vocab", folder / "vocab")
    (folder / "hidden_states").mkdir()
    for file in (source / "hidden_states").resolve().iterdir():
        if file.name == "manifest.json":
            shutil.copy(file, folder / "hidden_states")
        elif file.suffix == ".safetensors":
            (folder / "hidden_states" / file.name).symlink_to(file)
    return folder


def spoil(folder: Path, row: int, **changes: torch.Tensor) -> None:
    path = folder / "hidden_states" / f"hs_{row}.safetensors"
    tensors = load_file(path)
    path.unlink()
    save_file(tensors | changes, path)


def test_a_step_without_finite_gradient_is_skipped_and_counted(
    own_states: Path, tmp_path: Path, capsys
) -> None:
    states = load_file(own_states / "hidden_states" / "hs_3.safetensors")["hidden_states"]
    spoil(own_states, 3, hidden_states=torch.full_like(states, float("nan")))
    run = tmp_path / "run"
    assert train(run, own_states, "--epochs", "1", "--max-steps", "50") == 0
    assert manifest.read(run / "drafter", "04_train.py").counts["bad_steps"] == 1
    last = max(metrics(run, "train"))
    assert all(torch.isfinite(t).all() for t in weights(run, last).values())
    assert (
        train(tmp_path / "strict", own_states, "--epochs", "1", "--max-steps", "50", "--max-bad-steps", "0")
        == 1
    )
    error = capsys.readouterr().err
    assert "had no finite loss or gradient" in error
    assert "row 3 (0003#0, instructions)" in error


def test_states_of_other_tokens_stop_the_run(own_states: Path, tmp_path: Path, capsys) -> None:
    ids = load_file(own_states / "hidden_states" / "hs_3.safetensors")["token_ids"]
    spoil(own_states, 3, token_ids=ids + 1)
    assert train(tmp_path / "run", own_states, "--epochs", "1", "--max-steps", "50") == 1
    assert "other token ids than their own" in capsys.readouterr().err


def test_rows_that_the_capture_gave_up_are_left_out(own_states: Path, tmp_path: Path, capsys) -> None:
    (own_states / "hidden_states" / "hs_5.safetensors").unlink()
    assert train(tmp_path / "run", own_states) == 2
    assert "hs_5.safetensors: absent" in capsys.readouterr().err
    path = own_states / "hidden_states" / "manifest.json"
    made = json.loads(path.read_text())
    made["counts"] |= {"written": 39, "failed": 1, "failures": {"5": "shape: too short"}}
    path.write_text(json.dumps(made))
    assert train(tmp_path / "run", own_states, "--max-steps", "1") == 0
    counts = manifest.read(tmp_path / "run" / "drafter", "04_train.py").counts
    assert (counts["written"], counts["failed"]) == (35, 1)


def test_inputs_of_another_making_stop_the_run(own_states: Path, tmp_path: Path, capsys) -> None:
    path = own_states / "vocab" / "manifest.json"
    made = json.loads(path.read_text())
    made["inputs"]["dataset"] = "0123456789abcdef"
    path.write_text(json.dumps(made))
    assert train(tmp_path / "run", own_states, "--max-steps", "1") == 2
    error = capsys.readouterr().err
    assert "was not made from the present dataset/" in error
    assert "02_build_vocab_map.py --overwrite" in error
    assert train(tmp_path / "run", own_states, "--max-steps", "1", "--accept-stale") == 0
    assert manifest.read(tmp_path / "run" / "drafter", "04_train.py").accepted_stale == ["dataset"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epochs", "0"], "--epochs 0: must be at least 1"),
        (["--eval-ratio", "1"], "--eval-ratio 1.0: must be in [0, 1)"),
        (["--lr", "-1"], "--lr -1.0: must be at least 0"),
        (["--draft-vocab", "checkpoint"], "needs --finetune-from"),
        (["--gradient-accumulation-steps", "0"], "--gradient-accumulation-steps 0: must be at least 1"),
        (["--anchor", "10"], "--anchor needs --finetune-from"),
        (["--max-time", "3h", "--shard", "1/2"], "--max-time and --shard: the run could end before"),
        (["--max-steps", "9", "--shard", "1/2"], "--max-steps and --shard: the run could end before"),
        (["--fsdp"], "start 04_train.py by torchrun"),
        (["--max-time", "3 hours"], "'3 hours' is no time: write 3h, 90m, 45s or plain seconds"),
        (["--max-time", "0s"], "'0s' is no time"),
        (["--scheduler", "none"], "choose from"),
        (["--device", "cuda"], "no GPU is visible"),
    ],
)
def test_impossible_flags_are_named(flags: list[str], says: str, tmp_path: Path, capsys) -> None:
    if flags == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert exit_code(["--run-dir", str(tmp_path / "run"), *flags]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def exit_code(argv: list[str]) -> int:
    """argparse leaves by SystemExit."""
    try:
        return load_script("04_train").main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_read(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("04_train")
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert script.main(["--run-dir", str(tmp_path / "run"), "--report-to", "wandb"]) == 2
    assert "`pip install wandb`" in capsys.readouterr().err


def test_an_anchor_that_would_take_back_everything_is_refused(
    source: Path, public_head: Path, tmp_path: Path, capsys
) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--data-from", str(source)]
    flags += ["--finetune-from", str(public_head), "--lr", "1e-3", "--anchor", "1000"]
    assert load_script("04_train").main(flags) == 2
    assert "rate x W = 1.00 of the way to the start; W must be less than 1000" in capsys.readouterr().err


def test_a_missing_capture_names_the_stage(tmp_path: Path, capsys) -> None:
    assert load_script("04_train").main(["--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "hidden_states does not exist" in error
    assert "03_capture_hidden.py" in error


def test_the_export_for_sglang_is_the_same_drafter(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, source, "--max-steps", "1") == 0
    assert train(run, source, "--max-steps", "1", "--export", "specforge") == 0  # a finished run exports too
    ours, theirs = (load_file(run / name / "model.safetensors") for name in ("drafter", "specforge"))
    assert torch.equal(ours["layers.0.self_attn.q_proj.weight"], theirs["midlayer.self_attn.q_proj.weight"])
    assert "embed_tokens.weight" not in theirs
