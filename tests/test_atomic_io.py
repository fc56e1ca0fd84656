"""Files are whole or absent, logs lose no row to a crash, and a folder has one owner at a time."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import atomic_io
from common.errors import InputError, StageError

ROOT = Path(__file__).parent.parent


def start(code: str, *argv: str | Path) -> subprocess.Popen[str]:
    """A real process that has `common` on its path and has printed its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL


# ----------------------------------------------------------------------------------------------------------
# Whole or absent


def test_a_new_file_appears_with_its_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    atomic_io.write_json(tmp_path / "a" / "b" / "x.json", {"name": "Grüße", "n": [1, 2]})
    assert (tmp_path / "a" / "b" / "x.json").read_bytes() == (
        '{\n  "name": "Grüße",\n  "n": [\n    1,\n    2\n  ]\n}\n'.encode()
    )
    assert os.listdir(tmp_path / "a" / "b") == ["x.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_old_file_whole(tmp_path: Path, error) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def write() -> None:
        with atomic_io.replacing(path) as file:
            file.write("new but only half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with atomic_io.replacing(path, "wb") as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_kill_9_while_writing_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    process = start(
        "import sys, time, pathlib\n"
        "from common import atomic_io\n"
        "with atomic_io.replacing(pathlib.Path(sys.argv[1]), 'wb') as file:\n"
        "    file.write(b'n' * 1_000_000); file.flush(); print('ready', flush=True); time.sleep(60)\n",
        path,
    )
    kill(process)
    assert path.read_bytes() == b"old"


def test_a_library_that_wants_a_path_writes_beside_the_file(tmp_path: Path) -> None:
    with atomic_io.staged(tmp_path / "plot.png") as temporary:
        assert (temporary.parent, temporary.name[:10]) == (tmp_path, ".plot.png.")
        temporary.write_bytes(b"png")
    assert os.listdir(tmp_path) == ["plot.png"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"{", "not valid JSON"), (b"\xff{}", "not valid JSON")]
)
def test_json_that_cannot_be_read_is_bad_input_with_its_name(tmp_path: Path, content, message: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"x.json.*{message}"):
        atomic_io.read_json(path)


# ----------------------------------------------------------------------------------------------------------
# Logs


def append_all(path: Path, rows: list[dict]) -> None:
    with atomic_io.JsonLog(path) as kept:
        for row in rows:
            kept.append(row)


def test_rows_come_back_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    rows = [{"id": "a", "text": "zwei\nZeilen, 中文, \u2028"}, {"id": "b", "n": None}]
    append_all(path, rows[:1])
    append_all(path, rows[1:])
    assert list(atomic_io.read_json_lines(path)) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_half_a_surrogate_pair_survives_in_valid_utf8(tmp_path: Path) -> None:
    row = {"text": "broken emoji \ud83d and 中文"}
    append_all(tmp_path / "log.jsonl", [row])
    atomic_io.write_json(tmp_path / "x.json", row)
    assert list(atomic_io.read_json_lines(tmp_path / "log.jsonl")) == [row]
    assert atomic_io.read_json(tmp_path / "x.json") == row
    assert "中文" in (tmp_path / "log.jsonl").read_bytes().decode()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 80))
def test_a_crash_at_any_byte_loses_only_the_row_it_tore(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    rows = [{"id": number, "text": "ä"} for number in range(4)]
    append_all(path, rows)
    whole = path.read_bytes()
    assert len(whole) == 4 * 24
    path.write_bytes(whole[:cut])
    # 24 bytes a row; a row that lacks no more than its newline is whole.
    survivors = [row for row in rows if 24 * row["id"] + 23 <= cut]
    assert list(atomic_io.read_json_lines(path)) == survivors
    append_all(path, [{"id": 9}])
    assert list(atomic_io.read_json_lines(path)) == [*survivors, {"id": 9}]


def test_a_torn_row_longer_than_a_block_is_cut_off_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2, "text": "' + b"x" * 200_000)
    append_all(path, [{"id": 3}])
    assert path.read_bytes() == b'{"id": 1}\n{"id": 3}\n'


def test_a_log_that_is_torn_in_its_only_row_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": 1, "te')
    append_all(path, [{"id": 2}])
    assert path.read_bytes() == b'{"id": 2}\n'


def test_an_appended_row_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    process = start(
        "import sys, time, pathlib\n"
        "from common import atomic_io\n"
        "log = atomic_io.JsonLog(pathlib.Path(sys.argv[1]))\n"
        "[log.append({'id': i}) for i in range(100)]\n"
        "print('ready', flush=True); time.sleep(60)\n",
        path,
    )
    kill(process)
    assert [row["id"] for row in atomic_io.read_json_lines(path)] == list(range(100))


def test_blank_lines_and_a_missing_last_newline_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n\n  \r\n{"id": 2}')
    assert list(atomic_io.read_json_lines(path)) == [{"id": 1}, {"id": 2}]


def test_a_torn_last_line_is_skipped_aloud(tmp_path: Path, caplog) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": ')
    with caplog.at_level(logging.WARNING):
        assert list(atomic_io.read_json_lines(path)) == [{"id": 1}]
    assert "prompts.jsonl, line 2 is torn" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b'{"id": 1}\n{"id": \n{"id": 3}\n', "line 2 is not valid JSON"),
        (b'{"id": 1}\n\n[3]\n', "line 3: expected an object, found list"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, content, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"rows.jsonl.*{message}"):
        list(atomic_io.read_json_lines(path))


def test_a_row_that_is_no_json_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with atomic_io.JsonLog(path) as kept:
        kept.append({"id": 1})
        with pytest.raises(TypeError):
            kept.append({"id": object()})
        kept.append({"id": 2})
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2]


# ----------------------------------------------------------------------------------------------------------
# One owner

_HOLD = (
    "import sys, time, pathlib\n"
    "from common import atomic_io\n"
    "with atomic_io.locked(pathlib.Path(sys.argv[1])):\n"
    "    print('ready', flush=True); time.sleep(60)\n"
)


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = start(_HOLD, tmp_path / "out", "--some-flag")
    try:
        with pytest.raises(StageError) as refused:
            with atomic_io.locked(tmp_path / "out"):
                pass
    finally:
        kill(process)
    assert refused.value.exit_code == 1
    assert f"is locked by process {process.pid} on " in str(refused.value)
    assert "--some-flag. Wait for it, or end it" in str(refused.value)


def test_the_lock_of_a_killed_process_is_free_and_names_its_new_holder(tmp_path: Path) -> None:
    kill(start(_HOLD, tmp_path))
    with atomic_io.locked(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock-holder").read_text()
    assert not (tmp_path / ".lock-holder").exists()
    with atomic_io.locked(tmp_path):
        pass


def test_the_lock_is_released_by_an_error_and_refused_to_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_io.locked(tmp_path):
        raise ZeroDivisionError
    with atomic_io.locked(tmp_path):
        with pytest.raises(StageError, match="is locked by process"), atomic_io.locked(tmp_path):
            pass


def test_another_lock_s_timeout_inside_is_not_mistaken_for_ours(tmp_path: Path) -> None:
    from filelock import FileLock, Timeout

    with FileLock(tmp_path / "other", timeout=0):
        with pytest.raises(Timeout, match="other"), atomic_io.locked(tmp_path):
            FileLock(tmp_path / "other", timeout=0).acquire()


def test_waiting_is_refused_at_once(tmp_path: Path) -> None:
    with atomic_io.locked(tmp_path):
        began = time.monotonic()
        with pytest.raises(StageError), atomic_io.locked(tmp_path):
            pass
        assert time.monotonic() - began < 1
