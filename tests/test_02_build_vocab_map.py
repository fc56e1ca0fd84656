"""Stage 02: supervised tokens are counted, special ones forced, and speculators reads the map."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common import dataset, manifest
from common.dataset import TrainingRow
from common.draft_vocab import DraftVocab
from common.errors import InputError
from tests.conftest import ROOT, load_script

V = 100
# Two answers: prompt tokens 90 and 91 are not supervised. Counted: 50 x3, 7 x2, 60 x1, 2 (the stop) x2.
ROWS = [([90, 91, 50, 7, 2], [0, 0, 1, 1, 1]), ([90, 50, 60, 50, 7, 2], [0, 1, 1, 1, 1, 1])]
ALL_FILES = ["coverage.png", "d2t.npy", "manifest.json", "t2d.npy", "token_counts.npy"]


def write(folder: Path, rows=ROWS, facts: dict | None = None) -> None:
    dataset.write(
        folder,
        (
            TrainingRow(input_ids=ids, loss_mask=mask, seq_len=len(ids), id=f"{n}#0", source="s")
            for n, (ids, mask) in enumerate(rows)
        ),
    )
    if facts is not None:
        manifest.Manifest("01b_generate_synthetic", {}, facts=facts).write(folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier's config and tokenizer: 100 tokens, a few with a name, <|im_end|> = 2 ends an answer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("small")
    named = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    words = named | {f"w{number}": number for number in range(3, V)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|endoftext|>", eos_token="<|im_end|>"
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=V, eos_token_id=2).save_pretrained(folder)
    return folder


@pytest.fixture
def stage(run_dir: Path, small: Path):
    """Run the stage on `run_dir/dataset` and give its exit code."""
    write(run_dir / "dataset")

    def stage(*argv: str, size: int = 6, model: Path = small) -> int:
        given = ["--run-dir", str(run_dir), "--verifier", str(model), "--draft-vocab-size", str(size)]
        return load_script("02_build_vocab_map").main([*given, *argv])

    return stage


def chosen(run_dir: Path) -> list[int]:
    return DraftVocab.load(run_dir / "vocab").token_ids.tolist()


def files(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "vocab").iterdir() if p.name != ".lock")


# ----------------------------------------------------------------------------------------------------------
# What it makes


def test_supervised_tokens_are_counted_and_specials_forced(stage, run_dir: Path, small: Path) -> None:
    assert stage("--force-token", "<|im_start|>", "99", "--force-token", "<|endoftext|>", size=6) == 0
    counts = np.load(run_dir / "vocab" / "token_counts.npy")
    assert (counts.shape, counts.dtype) == ((V,), np.int64)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {50: 3, 7: 2, 60: 1, 2: 2}
    # <|endoftext|> is 0, <|im_start|> 1, <|im_end|> 2 always; the most frequent two others are 50 and 7.
    assert chosen(run_dir) == [0, 1, 2, 7, 50, 99]
    assert np.load(run_dir / "vocab" / "d2t.npy").tolist() == [0, 0, 0, 4, 46, 94]
    assert files(run_dir) == ALL_FILES
    assert (run_dir / "vocab" / "coverage.png").read_bytes()[:4] == b"\x89PNG"
    made = manifest.read(run_dir / "vocab", "02_build_vocab_map.py")
    assert made.counts == {
        "supervised_tokens": 8,
        "distinct_tokens": 4,
        "draft_vocab_size": 6,
        "coverage": 0.875,
        "forced": [0, 1, 2, 99],
        "forced_without_count": [0, 1, 99],
    }
    assert made.facts["verifier"] == str(small)
    assert made.facts["d2t"] == DraftVocab.load(run_dir / "vocab").fingerprint


def test_speculators_own_count_of_the_same_rows_gives_the_same_map(run_dir: Path, tmp_path: Path) -> None:
    import torch
    from speculators.train.vocab_mapping import (
        build_vocab_mappings_from_distribution,
        save_token_frequency_distribution,
    )

    random = np.random.default_rng(0)
    rows = [(random.integers(0, V, 40).tolist(), random.integers(0, 2, 40).tolist()) for _ in range(60)]
    write(run_dir / "dataset", rows)
    loaded = dataset.load(run_dir / "dataset")
    save_token_frequency_distribution(loaded, tmp_path / "freq.pt")
    theirs = torch.load(tmp_path / "freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(theirs, 32, V)
    counts = load_script("02_build_vocab_map").count_supervised(loaded, V)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == theirs
    ours = DraftVocab.most_frequent(counts, 32)
    assert ours.d2t.tolist() == d2t.tolist()
    assert ours.t2d.tolist() == t2d.tolist()


def test_a_data_set_of_speculators_own_is_counted_alike(run_dir: Path) -> None:
    import datasets

    # It writes the columns in another order, int64, and no manifest; here also a selection of its rows.
    columns = {"loss_mask": [m for _, m in ROWS], "input_ids": [i for i, _ in ROWS], "seq_len": [5, 6]}
    both = datasets.Dataset.from_dict(columns).with_format("torch")
    count = load_script("02_build_vocab_map").count_supervised
    assert count(both, V)[[50, 7, 60, 2, 90]].tolist() == [3, 2, 1, 2, 0]
    assert count(both.select([1]), V)[[50, 7, 60, 2, 90]].tolist() == [2, 1, 1, 1, 0]


def test_counts_of_many_batches_add_up(run_dir: Path) -> None:
    write(run_dir / "dataset", [([n % 7, 40], [1, 0]) for n in range(2500)])
    counts = load_script("02_build_vocab_map").count_supervised(dataset.load(run_dir / "dataset"), V)
    assert counts[:8].tolist() == [358, 357, 357, 357, 357, 357, 357, 0]
    assert counts.sum() == 2500


def test_five_million_tokens_are_counted_in_a_second_of_one_core() -> None:
    import datasets
    import pyarrow as pa

    ids = np.random.default_rng(0).integers(0, V, 5_000_000, dtype=np.int32)
    offsets = pa.array(np.arange(0, 5_000_001, 2000, dtype=np.int32))
    columns = {"input_ids": ids, "loss_mask": np.ones(5_000_000, dtype=np.uint8)}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, column) for name, column in columns.items()})
    rows = datasets.Dataset(table)
    count = load_script("02_build_vocab_map").count_supervised
    began = time.process_time()
    counts = count(rows, V)
    # 0.03 s as a rule; speculators' own loop over the same rows takes 3.
    assert time.process_time() - began < 1
    assert counts.tolist() == np.bincount(ids).tolist()


def test_a_head_s_own_map_is_compared_on_this_data(
    stage, public_head: Path, verifier_dir: Path, capsys
) -> None:
    # Of 50, 7, 60 and 2, the head's map lacks 7: two of the eight counted tokens.
    assert stage("--compare-to", str(public_head), size=4096, model=verifier_dir) == 0
    shown = capsys.readouterr().err
    assert f"{public_head}: its own map of 4096 tokens covers 75.00 % of this data" in shown
    assert "rebuilt map of 4096 tokens: 100.00 %" in shown
    assert "worth it: --draft-vocab rebuild lifts the ceiling by 25.00 points" in shown


# ----------------------------------------------------------------------------------------------------------
# Again


def test_a_second_run_does_nothing_and_a_resumed_one_finishes(stage, run_dir: Path) -> None:
    assert stage() == 0
    before = (run_dir / "vocab" / "manifest.json").read_bytes()
    assert stage() == 0
    assert (run_dir / "vocab" / "manifest.json").read_bytes() == before
    manifest.reopen(run_dir / "vocab")
    (run_dir / "vocab" / "t2d.npy").unlink()
    assert stage() == 0
    assert files(run_dir) == ALL_FILES


def test_another_size_is_refused_and_overwrite_takes_it(stage, run_dir: Path, capsys) -> None:
    assert stage(size=6) == 0
    assert stage(size=5) == 2
    assert "--draft-vocab-size was 6, now 5. Pass --overwrite" in capsys.readouterr().err
    assert len(chosen(run_dir)) == 6
    assert stage("--overwrite", size=5) == 0
    assert len(chosen(run_dir)) == 5


def test_a_changed_data_set_is_refused_and_can_be_accepted(stage, run_dir: Path, capsys) -> None:
    assert stage() == 0
    write(run_dir / "dataset", [*ROWS, ([5], [1])])
    assert stage() == 2
    assert "was made from another version of dataset" in capsys.readouterr().err
    assert stage("--accept-stale") == 0


def test_the_verifier_and_facts_come_from_the_data_set(run_dir: Path, small: Path) -> None:
    write(run_dir / "dataset", facts={"verifier": str(small), "thinking": "off"})
    main = load_script("02_build_vocab_map").main
    assert main(["--run-dir", str(run_dir), "--draft-vocab-size", "6"]) == 0
    facts = manifest.read(run_dir / "vocab", "02_build_vocab_map.py").facts
    assert (facts["verifier"], facts["thinking"]) == (str(small), "off")


# ----------------------------------------------------------------------------------------------------------
# Refused


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--draft-vocab-size", "101"],
            "--draft-vocab-size 101 must lie between the 1 forced",
        ),
        (["--draft-vocab-size", "0"], "--draft-vocab-size 0 must lie"),
        (["--force-token", "<think>"], "--force-token <think>: the tokenizer of "),
        (["--force-token", "100"], "--force-token 100 is outside of the verifier's vocabulary of 100"),
        (["--compare-to", "nobody/no-head"], "--compare-to nobody/no-head is neither a file, a folder"),
        (["--expect-token", "<|im_end|>=163586"], "the id 2, --expect-token 163586"),
    ],
)
def test_bad_input_writes_nothing_and_blocks_nothing(stage, run_dir: Path, capsys, argv, message) -> None:
    assert stage(*argv) == 2
    assert message in capsys.readouterr().err
    assert not (run_dir / "vocab").exists() or files(run_dir) == []
    assert stage() == 0, "the mended command is not taken for other settings"
    made = {path.name: path.read_bytes() for path in (run_dir / "vocab").iterdir()}
    assert stage("--overwrite", *argv) == 2
    assert {path.name: path.read_bytes() for path in (run_dir / "vocab").iterdir()} == made


def test_no_supervised_token_is_bad_input(stage, run_dir: Path, capsys) -> None:
    write(run_dir / "dataset", [([1, 2, 3], [0, 0, 0])])
    assert stage() == 2
    assert "dataset/ has no supervised token (every loss_mask is zero)" in capsys.readouterr().err


@pytest.mark.parametrize("token", [V, -1])
def test_an_id_outside_of_the_vocabulary_is_named(stage, run_dir: Path, capsys, token: int) -> None:
    write(run_dir / "dataset", [([1, token, 3], [1, 1, 1])])
    assert stage() == 2
    assert f"dataset/ has token id {token}, the verifier ids from 0 to 99" in capsys.readouterr().err


def test_rows_of_another_tokenizer_are_refused(stage, run_dir: Path, capsys) -> None:
    write(run_dir / "dataset", facts={"verifier": "Qwen/Qwen3-8B", "tokenizer": "0000"})
    assert stage() == 2
    assert "dataset/ holds ids of Qwen/Qwen3-8B; " in capsys.readouterr().err


def test_a_missing_data_set_names_the_stages_that_make_it(tmp_path: Path, capsys) -> None:
    assert load_script("02_build_vocab_map").main(["--run-dir", str(tmp_path / "none")]) == 2
    assert "`01b_generate_synthetic.py` first" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_damaged_output_of_a_finished_run_is_named(stage, run_dir: Path, capsys) -> None:
    assert stage() == 0
    (run_dir / "vocab" / "token_counts.npy").write_bytes(b"")
    assert stage() == 2
    assert "token_counts.npy is no plain array" in capsys.readouterr().err


def test_a_text_that_is_the_unknown_token_itself_can_be_forced(verifier_dir: Path) -> None:
    from common.verifier import Verifier

    token_id = load_script("02_build_vocab_map").token_id
    model = Verifier(str(verifier_dir))
    assert model.tokenizer.unk_token == "<|endoftext|>"
    assert [token_id(text, model) for text in ("<|endoftext|>", "<|im_end|>", "17")] == [0, 2, 17]
    with pytest.raises(InputError, match="has no such token"):
        token_id("no such token", model)


# ----------------------------------------------------------------------------------------------------------
# With a config


@pytest.fixture
def config(tmp_path: Path, small: Path) -> Path:
    section = {"verifier": str(small), "draft-vocab-size": 5, "force-token": [60]}
    (tmp_path / "c.yaml").write_text(json.dumps({"02_build_vocab_map": section}))
    return tmp_path / "c.yaml"


def test_the_config_s_section_sets_the_flags(run_dir: Path, config: Path, capsys) -> None:
    write(run_dir / "dataset")
    assert load_script("02_build_vocab_map").main(["--config", str(config), "--run-dir", str(run_dir)]) == 0
    assert chosen(run_dir) == [0, 2, 7, 50, 60]
    assert (
        "8 supervised tokens, 4 distinct; the draft vocabulary (D = 5) covers 100.00 %"
        in capsys.readouterr().err
    )


def test_started_as_a_command_it_reads_the_same_section(config: Path) -> None:
    command = [sys.executable, "02_build_vocab_map.py", "--config", str(config), "--print-config"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "  draft-vocab-size: 5  # file\n" in shown
    assert "  force-token: ['60']  # file\n" in shown
