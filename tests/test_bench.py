"""The harness of bench/: what it computes from given times, and that every row's script starts."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench import acceptance, growth, measure, train_step
from bench.__main__ import SCRIPTS, summary
from bench.measure import Line, Ratio, Spent
from common.errors import StageError
from common.evaluation import Answer, Run
from tests.conftest import ROOT


def test_the_ratio_is_the_median_of_rounds_and_its_spread_their_extremes() -> None:
    # 1/2, 3/4 and 2/2: the medians' ratio would be 2/2, the sums' 6/8.
    assert Ratio.of([1.0, 3.0, 2.0], [2.0, 4.0, 2.0]) == Ratio(0.75, 0.5, 1.0)
    assert str(Ratio(0.75, 0.5, 1.0)) == "0.75 [0.5-1]"
    assert str(Ratio(0.04567, 0.04567, 0.04567)) == "0.0457"


def test_rounds_of_different_number_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Ratio.of([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("goal", "met"), [("<= 0.5", "yes"), ("<= 0.49", "no"), (">= 0.5", "yes"), (">= 0.51", "no"), ("", "")]
)
def test_a_goal_is_met_by_the_median(goal: str, met: str) -> None:
    assert Line(1, "work", "1 s", "2 s", Ratio(0.5, 0.1, 0.9), goal).met == met


def test_sides_take_turns_and_the_first_round_is_thrown_away() -> None:
    called: list[tuple[str, int]] = []

    def side(name: str, seconds: float) -> measure.Side:
        def run(number: int) -> Spent:
            called.append((name, number))
            return Spent(seconds + number)

        return run

    found = measure.alternate({"a": side("a", 10), "b": side("b", 20)}, 2, thrown_away=1)
    assert called == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {"a": [Spent(11), Spent(12)], "b": [Spent(21), Spent(22)]}


def test_a_line_of_times_shows_medians() -> None:
    line = measure.time_line(
        1, "work", [Spent(1), Spent(2), Spent(6)], [Spent(4), Spent(4), Spent(4)], "its", ""
    )
    assert (line.ours, line.beside, line.ratio) == ("2.00 s", "its 4.00 s", Ratio(0.5, 0.25, 1.5))


def test_a_command_is_charged_for_its_children_too(tmp_path: Path) -> None:
    child = "import time; held = bytearray(b'1') * 150_000_000; time.sleep(0.6)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    spent = measure.command((sys.executable, "-c", parent), tmp_path / "log")
    assert 150e6 < spent.peak_bytes < 250e6
    assert 0.6 < spent.seconds < 30


def test_a_command_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="ended with code 3:\nno bread"):
        measure.command((sys.executable, "-c", "print('no bread'); raise SystemExit(3)"), tmp_path / "log")


def test_the_start_of_a_process_does_not_hide_how_time_grows() -> None:
    # 3 s of start, then 0.5 s, 2 s, 8 s; 3 s, then 0.1 s, 1.6 s, 25.6 s.
    assert growth.time_exponent(3.5, 5, 11) == pytest.approx(1)
    assert growth.time_exponent(3.1, 4.6, 28.6) == pytest.approx(2)
    linear, flat = growth.growth_lines("01", [Spent(3.5, 100), Spent(5, 100), Spent(11, 400)])
    assert (linear.met, flat.met) == ("yes", "no")
    assert flat.ratio.median == pytest.approx(0.5)


def served(drafts: int, accepted: list[int], answers: dict[str, list[int]]) -> Run:
    """A run of 05 with the steps of each prompt's answer."""
    told = [Answer(key, "s", [[0]], accepted_by_step=[steps]) for key, steps in answers.items()]
    return Run("d", "d", "f", "p", True, 3, 16, drafts, accepted, 9, 1.0, 0, told)


def test_accepted_drafts_are_divided_by_the_counters_and_the_interval_is_over_prompts() -> None:
    ours = served(4, [3, 2, 1], {"a": [3, 1], "b": [2, 0]})
    beside = served(8, [2, 1, 1], {"b": [1, 0, 0, 0], "a": [3, 0, 0, 0]})
    assert acceptance.accepted(ours) == 1.5
    found = acceptance.ratio(ours, beside)
    assert found.median == 3.0
    # Only a: (4 / 2) / (3 / 4); only b: (2 / 2) / (1 / 4).
    assert (found.low, found.high) == (pytest.approx(8 / 3), pytest.approx(4.0))


def test_a_step_is_compared_with_its_own_neighbour() -> None:
    step, wait = train_step.step_lines(
        train_step.SHAPES[0], [1.0, 3.0, 2.0], [2.0, 3.0, 4.0], [0.0, 0.0, 0.06]
    )
    assert step.ratio.median == 0.5
    assert step.met == "yes"
    assert wait.ratio.median == pytest.approx(0.0099, abs=1e-4)  # 0.06 / 6.06


def test_results_make_the_table_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    args = argparse.Namespace(quick=False, rows=7, rounds=2)
    line = Line(2, "count", "1.00 s", "its 4.00 s", Ratio(0.25, 0.2, 0.3), "<= 0.05")
    measure.report("bench/vocab.py", args, [line], ["both maps are equal"])
    assert json.loads((tmp_path / "vocab.json").read_text())["rows"] == 7
    shown = summary(["vocab", "memory"])
    assert "| 2 | count | 1.00 s | its 4.00 s | 0.25 [0.2-0.3] | <= 0.05 | no |" in shown
    assert "* row 2: both maps are equal" in shown
    assert shown.endswith("goals: 0 met, 1 missed")


def test_every_row_has_its_script() -> None:
    shared = {"__init__", "__main__", "measure", "corpus", "speculators_on_cpu"}
    assert {file.stem for file in (ROOT / "bench").glob("*.py")} - shared == set(SCRIPTS.values())


@pytest.mark.parametrize("script", [*SCRIPTS.values(), "__main__"])
def test_every_script_shows_how_it_is_used(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        import_module(f"bench.{script}").main()
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--quick" in shown
    assert f"python -m bench{'' if script == '__main__' else f'.{script}'}" in shown
