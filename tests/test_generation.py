"""Model names, and what is said of a thinking mode; conversations are covered by the tests of stage 01b."""

from __future__ import annotations

from typing import Any

import pytest

from common import generation
from common.errors import InputError, StageError


@pytest.mark.parametrize(
    ("served", "asked", "name"),
    [
        (["v"], None, "v"),
        (["other", "v"], None, "v"),
        (["other"], None, "other"),
        (["other", "v"], "other", "other"),
        ([], None, "v"),
        ([], "asked", "asked"),
    ],
)
def test_the_model_asked_for(served: list[str], asked: str | None, name: str) -> None:
    assert generation.served_name([{"id": model} for model in served], asked, "v") == name


@pytest.mark.parametrize(("served", "asked"), [(["a", "b"], None), (["a"], "c")])
def test_a_model_that_is_not_served_is_refused(served: list[str], asked: str | None) -> None:
    with pytest.raises(InputError, match="--server-model"):
        generation.served_name([{"id": model} for model in served], asked, "v")


class _Thinks:
    """Stands for a Reader whose turns say themselves whether they think."""

    @staticmethod
    def thinks(turn: bool) -> bool:
        return turn


@pytest.mark.parametrize(
    ("mode", "thinking", "right"),
    [
        ("on", 0, False),
        ("on", 1, True),
        ("on", 32, True),
        ("off", 0, True),
        ("off", 16, True),
        ("off", 17, False),
        ("default", 0, True),
        ("default", 32, True),
    ],
)
def test_a_thinking_mode_is_held_against_the_first_32_answers(mode: str, thinking: int, right: bool) -> None:
    rows = [{"turns": [False, number < thinking]} for number in range(32)]
    reader: Any = _Thinks()
    if right:
        generation.check_thinking(mode, "thinking", reader, rows)
    else:
        with pytest.raises(StageError, match=f"--thinking {mode}, but .* of the first 32 answers"):
            generation.check_thinking(mode, "thinking", reader, rows)


def test_counts_are_told_most_frequent_first() -> None:
    assert generation.counted(["stop", "length", "stop"]) == "2 stop, 1 length"
    assert generation.counted([]) == "none"
