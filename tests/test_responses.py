"""The log of responses under cuts and foreign hands, and the signs by which an answer is judged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import responses
from common.errors import InputError
from common.inference_pool import RequestFailed
from common.responses import ResponseLog
from tests.conftest import ROOT


def _row(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "source": "test", "turns": [{"content": text}]}


REFUSED = RequestFailed("http_400", "too long", 1, True)


def test_what_was_added_is_there_when_the_log_is_opened_again(tmp_path: Path) -> None:
    with ResponseLog(tmp_path) as log:
        log.add(_row("a", "ä\u2028\n"))
        log.add(_row("b"))
        assert log.read("a") == _row("a", "ä\u2028\n")
    with ResponseLog(tmp_path) as log:
        log.add(_row("c"))
        assert [name in log for name in "abcd"] == [True, True, True, False]
        assert [log.read(name) for name in "cab"] == [_row("c"), _row("a", "ä\u2028\n"), _row("b")]


def test_a_failure_counts_until_its_prompt_is_answered(tmp_path: Path) -> None:
    with ResponseLog(tmp_path) as log:
        log.fail("a", REFUSED)
        log.fail("b", REFUSED)
        log.add(_row("a"))
    with ResponseLog(tmp_path) as log:
        assert log.failed == {"b": {"id": "b", "reason": "http_400", "detail": "too long", "attempts": 1}}
        log.forget_mended_failures()
        log.fail("c", REFUSED)
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b", "c"]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=4), data=st.data())
def test_a_log_cut_anywhere_loses_only_the_row_that_was_cut(texts: list[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ResponseLog(folder) as log:
            for number, text in enumerate(texts):
                log.add(_row(str(number), text))
        path = folder / "responses.jsonl"
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        with ResponseLog(folder) as log:
            kept = [number for number in range(len(texts)) if str(number) in log]
            # A last line that lacks nothing but its line feed is whole.
            assert kept in (list(range(complete)), list(range(complete + 1)))
            assert [log.read(str(number)) for number in kept] == [_row(str(n), texts[n]) for n in kept]
            for number in range(len(texts)):
                if str(number) not in log:
                    log.add(_row(str(number), texts[number]))
        assert path.read_bytes() == whole


def test_rows_that_another_tool_wrote_are_found_by_their_id(tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").write_text('{"source": "s", "id": "a"}\n{ "id":"b"}\n')
    with ResponseLog(tmp_path) as log:
        assert log.read("b") == {"id": "b"}
        assert log.read("a") == {"id": "a", "source": "s"}


@pytest.mark.parametrize("line", ["{}", "[1]", "nonsense", '{"id": 7, '])
def test_a_line_that_is_no_response_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "responses.jsonl").write_text(f'{{"id": "a"}}\n{line}\n{{"id": "b"}}\n')
    with pytest.raises(InputError, match=r"responses\.jsonl, line 2 is no response"):
        ResponseLog(tmp_path)


def test_a_damaged_row_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").write_text('{"id": "a", "turns": [\n{"id": "b"}\n')
    with ResponseLog(tmp_path) as log:
        with pytest.raises(InputError, match="the row of a is damaged"):
            log.read("a")
        assert log.read("b") == {"id": "b"}


def test_a_loop_is_seen_and_code_is_not() -> None:
    script = (ROOT / "01b_generate_synthetic.py").read_bytes()
    assert responses.repetition(list(b"and so on, " * 20)) > 0.9
    assert responses.repetition([1, 2, 3] * 10) == 0  # too short to tell
    assert responses.repetition(list(script[:8000])) < 0.5
    assert responses.repetition(list(range(1000))) == 0


def test_a_training_row_is_prompt_and_answer_with_loss_on_the_answer() -> None:
    turn = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}
    assert responses.training_row({"id": "a", "source": "s", "turns": [{}, turn]}, 1) == {
        "input_ids": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 0, 1, 1],
        "seq_len": 5,
        "id": "a#1",
        "source": "s",
    }
