"""01 as its user runs it: shapes, files, the held-out split, kept answers, and errors that leave no trace."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from common import atomic_io, dataset, manifest
from common.conversations import Conversation
from tests.conftest import ROOT, SHARED, load_script

prepare = load_script("01_prepare_data")


def question(number: int, source: str = "s", answer: str = "An answer.") -> dict[str, Any]:
    turns = [{"from": "human", "value": f"Question {number}?"}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "source": source}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(run_dir: Path, *args: object) -> int:
    flags = ["--run-dir", str(run_dir), "--workers", "1", "--eval-prompts", "0", *map(str, args)]
    return prepare.main(flags)


def counts(run_dir: Path) -> dict[str, Any]:
    return manifest.read(run_dir / "prompts", "01").counts


# --- sources


KINDS = "jsonl json jsonl.gz jsonl.zst jsonl.bz2 json.xz parquet csv csv.gz array.json saved saved_dict dir"


@pytest.mark.parametrize("ending", KINDS.split())
def test_every_kind_of_file_gives_the_same_prompts(run_dir: Path, tmp_path: Path, ending: str) -> None:
    import datasets
    import pandas

    rows = [{"question": f"Question {n}?", "source": "s"} for n in range(2500)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"data.{ending}"
    table = datasets.Dataset.from_list(rows)
    match ending:
        case "jsonl" | "json":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.zst":
            path.write_bytes(zstandard.compress(lines))
        case "jsonl.bz2":
            path.write_bytes(bz2.compress(lines))
        case "json.xz":
            path.write_bytes(lzma.compress(lines))
        case "parquet":
            pandas.DataFrame(rows).to_parquet(path)
        case "csv" | "csv.gz":
            pandas.DataFrame(rows).to_csv(path, index=False)
        case "array.json":
            path.write_text(json.dumps(rows, indent=1))
        case "saved":
            table.save_to_disk(path)
        case "dir":
            path.mkdir()
            for part in range(2):
                rows_of_part = rows[part * 2000 : part * 2000 + 2000]
                pandas.DataFrame(rows_of_part).to_parquet(path / f"train-{part}.parquet")
        case "saved_dict":
            datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(path)
    assert run(run_dir, "--dataset", path) == 0
    train = rows_of(run_dir / "prompts" / "train.jsonl")
    assert len(train) == 2500
    assert train[2499]["messages"] == [{"role": "user", "content": "Question 2499?"}]
    assert train[2499]["source"] == "s"
    assert counts(run_dir)["read"] == 2500


def test_several_data_sets_of_several_shapes_are_one_and_each_shape_is_shown(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = write_lines(tmp_path / "one.jsonl", [question(1)])
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    text_call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    two = write_lines(
        tmp_path / "two.jsonl",
        [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]},
                          {"role": "assistant", "content": "x", "tool_calls": [text_call]}]},
            {"prompt": "c"},
        ],
    )  # fmt: skip
    assert run(run_dir, "--dataset", one, "--dataset", two) == 0
    train = rows_of(run_dir / "prompts" / "train.jsonl")
    assert [(row["source"], row["messages"][0]["content"]) for row in train] == [
        ("s", "Question 1?"), ("two", "a"), ("two", "b"), ("two", "c"),
    ]  # fmt: skip
    shown = capfd.readouterr().err
    assert "one.jsonl: 1 ShareGPT (conversations: from/value)" in shown
    assert "two.jsonl: 2 OpenAI (messages: role/content), 1 prompt only (prompt)" in shown


def test_nulls_that_a_table_fills_in_are_not_taken_for_values(run_dir: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tools = [[{"name": "f", "a": 1, "b": None}], [{"name": "g", "a": None, "b": 2}]]
    users = [
        [{"role": "user", "content": "x", "name": None}],
        [{"role": "user", "content": "y", "name": "N"}],
    ]
    pq.write_table(pa.table({"messages": users, "tools": tools}), tmp_path / "t.parquet")
    assert run(run_dir, "--dataset", tmp_path / "t.parquet") == 0
    train = rows_of(run_dir / "prompts" / "train.jsonl")
    assert [row["tools"] for row in train] == [[{"name": "f", "a": 1}], [{"name": "g", "b": 2}]]
    assert train[0]["messages"] == [{"role": "user", "content": "x"}]


# --- rows


def test_dropped_rows_are_counted_by_reason_and_the_first_is_named(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    narrator = {"conversations": [{"from": "human", "value": "x"}, {"from": "narrator", "value": "y"}]}
    file = write_lines(tmp_path / "d.jsonl", [question(n) for n in range(5)] + [narrator, [1], narrator, {}])
    assert run(run_dir, "--dataset", file) == 0
    dropped = {"unknown_role": 2, "row_not_an_object": 1, "no_known_columns": 1}
    assert counts(run_dir) == {"read": 9, "written": 5, "train": 5, "eval": 0, "dropped": dropped}
    assert f"2  unknown_role  (first: {file}, row 6: 'narrator')" in capfd.readouterr().err


def test_duplicate_prompts_are_dropped_whatever_their_answers_white_space_or_case(
    run_dir: Path, tmp_path: Path
) -> None:
    again = {"messages": [{"role": "user", "content": " question  1?\n"}]}
    file = write_lines(tmp_path / "d.jsonl", [question(1), question(2), question(1, answer="Other."), again])
    assert run(run_dir, "--dataset", file) == 0
    assert [row["messages"][0]["content"] for row in rows_of(run_dir / "prompts" / "train.jsonl")] == [
        "Question 1?", "Question 2?",
    ]  # fmt: skip
    assert counts(run_dir)["dropped"] == {"duplicate": 2}


def test_the_same_rows_have_the_same_ids_in_another_shape_order_and_number_of_workers(
    tmp_path: Path,
) -> None:
    rows = [question(n) for n in range(2200)]
    others = [{"prompt": f"Question {n}?", "source": "s"} for n in reversed(range(2200))]
    assert run(tmp_path / "a", "--dataset", write_lines(tmp_path / "a.jsonl", rows)) == 0
    assert run(tmp_path / "b", "--dataset", write_lines(tmp_path / "b.jsonl", others), "--workers", 2) == 0
    first, second = (rows_of(tmp_path / name / "prompts" / "train.jsonl") for name in "ab")
    assert first == second[::-1]


# --- the split


def test_held_out_prompts_are_exactly_n_each_source_gives_its_share_and_the_seed_decides(
    tmp_path: Path,
) -> None:
    rows = [question(n, source="big" if n % 4 else "small") for n in range(400)]
    file = write_lines(tmp_path / "d.jsonl", rows)
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run(tmp_path / name, "--dataset", file, "--eval-prompts", 21, "--seed", seed) == 0
        held_out = rows_of(tmp_path / name / "prompts" / "eval.jsonl")
        sizes = Counter(row["source"] for row in held_out)
        assert sizes == {"big": 16, "small": 5}
        assert len(rows_of(tmp_path / name / "prompts" / "train.jsonl")) == 379
        found.append({row["id"] for row in held_out})
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_row_that_joins_does_not_reshuffle_the_held_out_prompts(tmp_path: Path) -> None:
    rows = [question(n) for n in range(300)]
    for name, given_rows in (("a", rows), ("b", [question(999), *rows])):
        file = write_lines(tmp_path / f"{name}.jsonl", given_rows)
        assert run(tmp_path / name, "--dataset", file, "--eval-prompts", 30) == 0
    first, second = ({r["id"] for r in rows_of(tmp_path / n / "prompts" / "eval.jsonl")} for n in "ab")
    assert len(first & second) >= 29


def test_no_opening_is_on_both_sides_of_the_split(run_dir: Path, tmp_path: Path) -> None:
    rows = []
    for n in range(120):
        opening = {"role": "user", "content": f"Opening {n % 40}"}
        rows += [{"messages": [opening, {"role": "user", "content": f"Follow-up {n}"}]}]
        rows += [
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": f"OPENING  {n % 40}"},
                ]
            }
        ]
    assert run(run_dir, "--dataset", write_lines(tmp_path / "d.jsonl", rows), "--eval-prompts", 10) == 0

    def openings(name: str) -> list[str]:
        found = [Conversation.from_row(row) for row in rows_of(run_dir / "prompts" / name)]
        return [next(m for m in c.messages if m.role == "user").content.casefold().split()[1] for c in found]

    held_out = openings("eval.jsonl")
    assert len(held_out) == len(set(held_out)) == 10
    assert not set(held_out) & set(openings("train.jsonl"))
    # 40 openings have three follow-ups and one prompt with a system message each; 80 of these repeat.
    assert counts(run_dir)["dropped"] == {"duplicate": 80, "shares_held_out_opening": 30}


def test_one_source_of_a_mixed_file_may_be_asked_for(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(n, source="ab"[n % 2]) for n in range(20)])
    assert run(run_dir, "--dataset", file, "--source", "b", "--eval-prompts", 3) == 0
    assert {row["source"] for row in rows_of(run_dir / "prompts" / "train.jsonl")} == {"b"}
    assert counts(run_dir)["dropped"] == {"other_source": 10}
    assert run(run_dir, "--dataset", file, "--source", "c", "--overwrite") == 2
    assert "--source c: no usable row has this source, found: a, b" in capfd.readouterr().err


def test_max_samples_draws_from_the_whole_of_the_data(run_dir: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(n, source=str(n // 500)) for n in range(1000)])
    assert run(run_dir, "--dataset", file, "--max-samples", 100) == 0
    sizes = Counter(row["source"] for row in rows_of(run_dir / "prompts" / "train.jsonl"))
    assert sizes.total() == 100
    assert min(sizes["0"], sizes["1"]) > 30


# --- kept answers


def test_kept_answers_become_training_rows_of_train_prompts_only(
    run_dir: Path, tmp_path: Path, verifier_dir: Path
) -> None:
    rows = [question(n, answer=f"Answer {n}.") for n in range(40)] + [{"prompt": "No answer here"}]
    file = write_lines(tmp_path / "d.jsonl", rows)
    keep = ["--answers", "keep", "--verifier", verifier_dir, "--eval-prompts", 10]
    assert run(run_dir, "--dataset", file, *keep) == 0
    loaded = dataset.load(run_dir / "dataset")
    train = [row["id"] for row in rows_of(run_dir / "prompts" / "train.jsonl")]
    assert {name.removesuffix("#0") for name in loaded["id"]} <= set(train)
    record = manifest.read(run_dir / "dataset", "01")
    assert record.counts["read"] == len(train) == 31
    assert record.counts["written"] == len(loaded) == 31 - record.counts["dropped"].get("no_answer", 0)
    assert record.facts["verifier"] == str(verifier_dir)
    assert record.facts["chat_template"]
    assert all(row["input_ids"][-1] == 2 and row["loss_mask"][-1] == 1 for row in loaded)
    assert all(row["messages"][-1]["role"] == "user" for row in rows_of(run_dir / "prompts" / "train.jsonl"))


def test_kimi_rows_are_split_by_turn_and_the_rewriting_is_told(
    run_dir: Path, tmp_path: Path, kimi_like_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning": "Two and two."},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "6", "reasoning": "Threes."},
    ]  # fmt: skip
    file = write_lines(tmp_path / "d.jsonl", [{"messages": messages}])
    assert run(run_dir, "--dataset", file, "--answers", "keep", "--verifier", kimi_like_dir) == 0
    assert [name[-2:] for name in dataset.load(run_dir / "dataset")["id"]] == ["#0", "#1"]
    assert "rewrote the history of 1 of 1 conversations with several answers" in capfd.readouterr().err


def test_kept_answers_are_the_same_over_two_workers(tmp_path: Path, verifier_dir: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(n) for n in range(250)])
    for name, workers in (("a", 1), ("b", 2)):
        flags = ["--answers", "keep", "--verifier", verifier_dir, "--workers", workers]
        assert run(tmp_path / name, "--dataset", file, *flags) == 0
    first, second = (dataset.load(tmp_path / name / "dataset").with_format(None) for name in "ab")
    assert first.to_list() == second.to_list()


def test_a_row_longer_than_asked_is_dropped(run_dir: Path, tmp_path: Path, verifier_dir: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(1), question(2, answer="word " * 200)])
    flags = ["--answers", "keep", "--verifier", verifier_dir, "--max-length", 100]
    assert run(run_dir, "--dataset", file, *flags) == 0
    assert manifest.read(run_dir / "dataset", "01").counts["dropped"] == {"too_long": 1}


def test_a_template_that_takes_too_few_answers_fails_and_leaves_no_data_set(
    run_dir: Path, tmp_path: Path, verifier_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(1), question(2, answer=""), question(3, answer="")])
    flags = ["--dataset", file, "--answers", "keep", "--verifier", verifier_dir]
    assert run(run_dir, *flags) == 1
    assert "usable answers: 1 of 3 = 33.3% (--min-kept 50%)" in capfd.readouterr().err
    assert not (run_dir / "dataset" / "state.json").exists()
    assert not (run_dir / "prompts" / "manifest.json").exists()
    assert run(run_dir, *flags, "--min-kept", 0.3) == 0


def test_rows_asked_for_of_another_verifier_or_length_are_not_taken_for_done(
    run_dir: Path, tmp_path: Path, verifier_dir: Path, kimi_like_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(1), question(2)])
    flags = ["--dataset", file, "--answers", "keep", "--verifier"]
    assert run(run_dir, *flags, verifier_dir) == 0
    assert run(run_dir, *flags, verifier_dir) == 0
    capfd.readouterr()
    assert run(run_dir, *flags, kimi_like_dir) == 2
    assert f"--verifier was {str(verifier_dir)!r}, now {str(kimi_like_dir)!r}" in capfd.readouterr().err
    assert run(run_dir, *flags, verifier_dir, "--max-length", 99) == 2
    assert "--max-length was" in capfd.readouterr().err


def test_overwriting_kept_answers_fails_before_anything_old_is_gone(
    run_dir: Path, tmp_path: Path, verifier_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = write_lines(tmp_path / "good.jsonl", [question(1), question(2)])
    bad = write_lines(tmp_path / "bad.jsonl", [question(3), question(4, answer=""), question(5, answer="")])
    flags = ["--answers", "keep", "--verifier", verifier_dir]
    assert run(run_dir, "--dataset", good, *flags) == 0

    def files() -> dict[Path, bytes]:
        found = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
        return {path.relative_to(run_dir): content for path, content in found.items()}

    before = files()
    assert run(run_dir, "--dataset", bad, *flags, "--overwrite") == 1
    assert "usable answers: 1 of 3" in capfd.readouterr().err
    assert files() == before
    assert run(run_dir, "--dataset", good, *flags, "--overwrite", "--expect-token", "<|im_end|>=7") == 2
    assert "--expect-token 7" in capfd.readouterr().err
    assert files() == before
    assert run(run_dir, "--dataset", bad, *flags, "--overwrite", "--min-kept", 0.3) == 0
    assert len(dataset.load(run_dir / "dataset")) == 1
    assert counts(run_dir)["train"] == 3


def test_rows_that_01b_made_are_not_replaced_without_a_word(
    run_dir: Path, tmp_path: Path, verifier_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest.Manifest("01b_generate_synthetic", {}).write(run_dir / "dataset")
    file = write_lines(tmp_path / "d.jsonl", [question(1)])
    flags = ["--dataset", file, "--answers", "keep", "--verifier", verifier_dir]
    assert run(run_dir, *flags) == 2
    assert "was made by 01b_generate_synthetic.py" in capfd.readouterr().err
    assert run(run_dir, "--dataset", file) == 0


# --- reruns and errors


def test_a_rerun_finds_its_work_done_and_other_settings_are_refused(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(n) for n in range(9)])
    assert run(run_dir, "--dataset", file) == 0
    before = (run_dir / "prompts" / "manifest.json").read_bytes()
    assert run(run_dir, "--dataset", file) == 0
    assert "already done" in capfd.readouterr().err
    assert run(run_dir, "--dataset", file, "--seed", 1) == 2
    assert "--seed was 0, now 1" in capfd.readouterr().err
    write_lines(file, [question(n) for n in range(8)])
    assert run(run_dir, "--dataset", file) == 2
    assert "made from another version" in capfd.readouterr().err
    assert (run_dir / "prompts" / "manifest.json").read_bytes() == before
    assert run(run_dir, "--dataset", file, "--overwrite") == 0
    assert counts(run_dir)["read"] == 8


@pytest.mark.parametrize(
    ("content", "flags", "code", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', [], 2, r"d.jsonl, line 2 is not valid JSON"),
        ('{"prompt": "a"}\n\n{torn\n', [], 2, r"d.jsonl, line 3 is not valid JSON"),
        ("", [], 2, "the data sets hold no rows"),
        ('{"prompt": "a"}\n', ["--eval-prompts", "1"], 2, "--eval-prompts 1: there are 1 different openings"),
        ('{"prompt": "a"}\n{"x": 1}\n{"x": 1}\n', [], 1, "usable rows: 1 of 3 = 33.3% (--min-kept 50%)"),
        ('{"prompt": "a"}\n', ["--answers", "keep"], 2, "pass --verifier"),
        ('{"prompt": "a"}\n', ["--dataset", "absent.jsonl"], 2, "absent.jsonl: no such file"),
        ('{"prompt": "a"}\n', ["--dataset", __file__], 2, "unknown ending"),
        (
            '{"prompt": "a"}\n',
            ["--dataset", "nobody/nothing"],
            2,
            "--dataset nobody/nothing (split train) cannot",
        ),
    ],
)
def test_bad_input_is_named_and_leaves_earlier_prompts_untouched(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    content: str, flags: list[str], code: int, message: str,
) -> None:  # fmt: skip
    good = write_lines(tmp_path / "good.jsonl", [question(1)])
    assert run(run_dir, "--dataset", good) == 0
    before = {path.name: path.read_bytes() for path in (run_dir / "prompts").iterdir()}
    (tmp_path / "d.jsonl").write_text(content)
    capfd.readouterr()
    for workers in (1, 2):
        again = ["--dataset", tmp_path / "d.jsonl", "--overwrite", "--workers", workers, *flags]
        assert run(run_dir, *again) == code
        assert message in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in (run_dir / "prompts").iterdir()} == before
    assert not (run_dir / ".01_prepare_data").exists()


def start(run_dir: Path, file: Path) -> subprocess.Popen[str]:
    """01 as a process of its own, in a group of its own, over two workers."""
    flags = ["--run-dir", str(run_dir), "--dataset", str(file), "--eval-prompts", "50", "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "01_prepare_data.py"), *flags],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_killed_at_any_moment_a_rerun_gives_what_an_undisturbed_run_gives(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(n) for n in range(6000)])
    assert start(tmp_path / "whole", file).wait() == 0
    wanted = [(tmp_path / "whole" / "prompts" / f"{name}.jsonl").read_bytes() for name in ("train", "eval")]
    for number, seconds in enumerate((0.3, 0.8, 1.2, 1.6)):
        killed = start(tmp_path / "killed", file)
        time.sleep(seconds)
        killed.kill() if number % 2 else killed.send_signal(signal.SIGINT)
        assert killed.wait() in (-signal.SIGKILL, -signal.SIGINT, 130, 0)
    rerun = start(tmp_path / "killed", file)
    assert rerun.wait() == 0, rerun.stderr and rerun.stderr.read()
    found = [(tmp_path / "killed" / "prompts" / f"{name}.jsonl").read_bytes() for name in ("train", "eval")]
    assert found == wanted
    assert not (tmp_path / "killed" / ".01_prepare_data").exists()


def test_a_second_process_on_the_run_folder_stops_and_says_who_holds_it(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(1)])
    with atomic_io.locked(run_dir / "prompts"):
        assert run(run_dir, "--dataset", file) == 1
    assert f"is locked by process {os.getpid()}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--workers", "0"), ("--max-length", "0"), ("--min-kept", "1.5"), ("--eval-prompts", "-1")],
)
def test_numbers_out_of_range_are_refused_by_the_parser(run_dir: Path, flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        run(run_dir, "--dataset", "any.jsonl", flag, value)
    assert stop.value.code == 2
    assert not run_dir.exists()


def test_after_an_error_other_settings_may_follow(run_dir: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", [question(1), question(2)])
    assert run(run_dir, "--dataset", file, "--eval-prompts", 7) == 2
    assert run(run_dir, "--dataset", file, "--eval-prompts", 1) == 0


@pytest.mark.parametrize("content", [b"PAR1 no parquet", b"\x1f\x8b torn gzip"])
def test_a_damaged_file_is_bad_input(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / ("d.parquet" if content.startswith(b"PAR1") else "d.jsonl.gz")
    file.write_bytes(content)
    assert run(run_dir, "--dataset", file) == 2
    assert str(file) in capfd.readouterr().err


def test_real_prompts_come_through_whole(run_dir: Path) -> None:
    if not SHARED.exists():
        pytest.skip("the shared folder is not here")
    data = [SHARED / "data" / name for name in ("prompts_t0.jsonl", "prompts_self_instruct.jsonl")]
    assert run(run_dir, "--dataset", data[0], "--dataset", data[1], "--eval-prompts", 100) == 0
    assert counts(run_dir) == {
        "read": 3118, "written": 3101, "train": 3001, "eval": 100, "dropped": {"duplicate": 17},
    }  # fmt: skip
