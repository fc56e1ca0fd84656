"""03 and 04 in turn over one run folder: the losses of one store, in order, and resumable after any kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common import atomic_io, manifest
from common.errors import InputError
from common.shards import Shard
from tests.conftest import load_script
from tests.reference_states import TEXTS, write_rows
from tests.tiny_verifiers import DEEPSEEK_IDS, save_deepseek_v3

TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "32", "--intermediate-size", "64"]
HOLD = ["--eval-ratio", "0.2"]
ROWS = 20
# 20 texts of one token less each, so that no two rows are alike.
MANY = [TEXTS[number % 4][number:] for number in range(ROWS)]


@pytest.fixture(scope="module")
def source(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty rows, a vocabulary of 512, and a verifier with random weights."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny = save_deepseek_v3(folder / "verifier", verifier_dir)
    write_rows(folder / "dataset", tiny, MANY)
    record = manifest.Manifest(stage="01b_generate_synthetic", config={})
    record.facts = {"verifier": str(tiny)}
    record.write(folder / "dataset")
    assert (
        load_script("02_build_vocab_map").main(["--run-dir", str(folder), "--draft-vocab-size", "512"]) == 0
    )
    return folder


def begin(run: Path, source: Path) -> Path:
    run.mkdir()
    for name in ("dataset", "vocab"):
        shutil.copytree(source / name, run / name)
    return run


def capture(run: Path, source: Path, *flags: str) -> int:
    """One row at a time: in a batch the states' last bits depend on the other rows."""
    argv = ["--run-dir", str(run), "--verifier", str(source / "verifier"), "--backend", "transformers"]
    return load_script("03_capture_hidden").main(
        [*argv, "--dtype", "float32", "--batch-tokens", "1", "--layer-ids", *map(str, DEEPSEEK_IDS), *flags]
    )


def train(run: Path, source: Path, *flags: str) -> int:
    argv = ["--run-dir", str(run), "--verifier", str(source / "verifier"), *TINY, *HOLD]
    recipe = ["--lr", "1e-3", "--epochs", "2", "--total-seq-len", "256", "--save-every", "2"]
    return load_script("04_train").main([*argv, *recipe, *flags])


def curve(run: Path) -> list[tuple[int, float, float]]:
    rows = atomic_io.read_json_lines(run / "checkpoints" / "metrics.jsonl")
    return [(row["step"], row["train"]["loss"], row["train"]["lr"]) for row in rows if "train" in row]


def stored(run: Path) -> set[int]:
    return {int(path.stem[3:]) for path in (run / "hidden_states").glob("hs_*.safetensors")}


@pytest.fixture(scope="module")
def one_store(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = begin(tmp_path_factory.mktemp("one") / "run", source)
    assert capture(run, source) == 0
    for number in (1, 2):
        assert train(run, source, "--shard", f"{number}/2") == 0
    return run


def test_shards_in_turn_give_the_losses_of_one_store_to_the_last_bit(
    one_store: Path, source: Path, tmp_path: Path
) -> None:
    run = begin(tmp_path / "run", source)
    seen: list[set[int]] = []
    for number in (1, 2):
        shard = ["--shard", f"{number}/2"]
        assert capture(run, source, *shard, *HOLD) == 0
        seen.append(stored(run))
        assert train(run, source, *shard) == 0
        assert (run / "drafter" / "manifest.json").exists() == (number == 2)
        # A driver loop that is run again from its beginning does nothing twice.
        before = curve(run)
        for earlier in range(1, number + 1):
            assert capture(run, source, "--shard", f"{earlier}/2", *HOLD) == 0
            assert train(run, source, "--shard", f"{earlier}/2") == 0
        assert curve(run) == before
        assert stored(run) == seen[-1]
    held_out = {16, 17, 18, 19}
    assert seen[0] & seen[1] == held_out
    assert seen[0] | seen[1] == set(range(ROWS))
    assert curve(run) == curve(one_store)
    steps = [step for step, _, _ in curve(run)]
    assert steps == list(range(1, len(steps) + 1))
    # One cosine over all shards, from the full rate to 0 behind the last step.
    rates = [rate for _, _, rate in curve(run)]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-4
    ours, theirs = (manifest.read(folder / "drafter", "04") for folder in (run, one_store))
    assert ours.facts["best"] == theirs.facts["best"]
    assert ours.counts == theirs.counts
    assert ours.counts["written"] == 16
    weights = [(folder / "drafter" / "model.safetensors").read_bytes() for folder in (run, one_store)]
    assert weights[0] == weights[1]


def test_the_mean_loss_is_that_of_a_run_over_all_rows_at_once(
    one_store: Path, source: Path, tmp_path: Path
) -> None:
    run = begin(tmp_path / "run", source)
    shutil.copytree(one_store / "hidden_states", run / "hidden_states")
    assert train(run, source) == 0
    means = [sum(loss for _, loss, _ in curve(folder)) / len(curve(folder)) for folder in (run, one_store)]
    # Each row is met twice before the next shard begins, and rows share other batches: measured 1.3 % apart.
    assert means[0] == pytest.approx(means[1], rel=0.04)


def test_what_is_not_due_is_refused_by_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "run", source)
    assert capture(run, source, "--shard", "2/3") == 2
    assert "shard 1/3 is not trained yet" in capsys.readouterr().err
    assert not (run / "hidden_states").exists()
    assert capture(run, source, "--shard", "1/3", *HOLD) == 0
    kept = stored(run)
    for refused in (
        lambda: capture(run, source, "--shard", "2/3", *HOLD),
        lambda: train(run, source, "--shard", "2/3"),
    ):
        assert refused() == 2
        assert "`04_train.py ... --shard 1/3` first" in capsys.readouterr().err
    assert stored(run) == kept
    assert capture(run, source, "--shard", "1/4", *HOLD) == 2
    assert "--shard was 'i/3', now 'i/4'" in capsys.readouterr().err
    for flags, words in (
        ([], "holds one of 3 shards, this run wants all rows"),
        (["--shard", "1/4"], "holds one of 3 shards, this run wants 1/4"),
        (["--shard", "1/3", "--eval-ratio", "0.1"], "03 took 0.2 for its shards"),
        (["--shard", "1/3", "--max-steps", "3"], "--max-steps and --shard: the run could end before"),
        (["--shard", "2/3", "--overwrite"], "--overwrite begins the run anew"),
    ):
        assert train(run, source, *flags) == 2
        assert words in capsys.readouterr().err
    (run / "hidden_states" / f"hs_{min(kept)}.safetensors").unlink()
    assert train(run, source, "--shard", "1/3") == 2
    assert "Run 03_capture_hidden.py --shard 1/3" in capsys.readouterr().err


def test_states_go_only_when_the_shard_is_recorded_as_trained(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill between 03's and 04's work at any place leaves something that the same loop completes."""
    run = begin(tmp_path / "run", source)
    small = ["--trim", "--context", "16", "--store-dtype", "fp8", "--compress", "zstd", *HOLD]
    assert capture(run, source, "--shard", "1/2", *small) == 0
    assert train(run, source, "--shard", "1/2") == 0
    first = stored(run)
    # Killed in 03 after some rows of the second shard: its folder has no manifest. A held-out file that got
    # lost comes back, too: all shards are measured on the same rows.
    assert capture(run, source, "--shard", "2/2", *small) == 0
    second = stored(run)
    for gone in (min(second - first), max(second & first)):
        (run / "hidden_states" / f"hs_{gone}.safetensors").unlink()
    record = run / "hidden_states" / "manifest.json"
    record.rename(record.with_name(".started.json"))
    for number in (1, 2):
        assert capture(run, source, "--shard", f"{number}/2", *small) == 0
        assert train(run, source, "--shard", f"{number}/2") == 0
    assert stored(run) == second
    # Files of the other shard are not damaged, they are not there.
    assert capture(run, source, "--shard", "2/2", *small, "--verify") == 0
    assert capture(run, source, "--shard", "1/2", *small, "--verify") == 2
    assert "holds the states of shard 2/2" in capsys.readouterr().err
    # To train all of it once more, both stages begin anew.
    assert train(run, source, "--shard", "1/2", "--overwrite") == 2
    assert "--shard 1/2 (with --overwrite, if it was trained before)" in capsys.readouterr().err
    assert capture(run, source, "--shard", "1/2", *small, "--overwrite", "--max-disk", "0") == 2
    assert "pass --overwrite to `04_train.py --shard 1/2` as well" in capsys.readouterr().err
    counts = manifest.read(run / "hidden_states", "03").counts
    assert counts["dropped"] == {
        "trained": len(first - second),
        "later_shards": 0,
        "no_supervised_token": 0,
    }
    assert json.loads((run / "checkpoints" / "shards.json").read_text()) == {
        "count": 2,
        "trained": 2,
        "failed": [],
    }
    assert (run / "drafter" / "manifest.json").exists()


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "-1/4", "1/4/2"])
def test_a_shard_is_named_by_two_numbers(text: str) -> None:
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="expected i/n"):
        Shard.parse(text)
    assert Shard.parse("2/4") == Shard(2, 4)


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    Shard(1, 4).record_trained(tmp_path, [])
    with pytest.raises(InputError, match=r"trains in 4 shards. Pass --shard \.\.\./4"):
        Shard(2, 5).is_trained(tmp_path)
