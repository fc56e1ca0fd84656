"""Bars: drawn in a terminal, a line now and then elsewhere, by one process only."""

from __future__ import annotations

import logging

import pytest

from common import log


def advance(count: int) -> None:
    with log.bar(4, unit="rows", description="capture") as bar:
        for _ in range(count):
            bar.update()
            bar.refresh()


def test_outside_a_terminal_a_bar_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="stage.progress"):
        advance(2)
        assert not caplog.messages
        monkeypatch.setattr(log, "_TELL_EVERY_S", 0.0)
        advance(2)
    assert caplog.messages[-1].startswith("capture: 2/4 rows, ")
    assert "rows/s, " in caplog.messages[-1]
    assert " left" in caplog.messages[-1]
    assert "\r" not in capsys.readouterr().err


def test_only_the_first_of_several_processes_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_TELL_EVERY_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, logger="stage.progress"):
        advance(2)
    assert not caplog.messages
