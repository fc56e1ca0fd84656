"""common/report.py: tables and plot."""

from __future__ import annotations

from pathlib import Path

from common import report
from tests.test_evaluation import BASE, TUNED, a_run, alone, answers, results


def test_the_report_has_a_row_for_each_run_and_the_verdict():
    found = results(alone(), a_run("base", answers(BASE)), a_run("tuned", answers(TUNED), seconds=5.0))
    text = report.markdown(found, "acceptance.png")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert ["verifier alone", "-", "1", "1.000", "48.0", "1.00", "-"] in cells
    (tuned,) = [row for row in cells if row[0] == "tuned" and len(row) == 7]
    assert tuned[3].startswith("1.667 [")
    assert tuned[4:] == ["96.0", "2.00", "12 of 12"]
    assert ["Drafter", "K", "Streams", "Position 0", "Position 1"] in cells
    assert "in domain" in text
    assert "* tuned against base, a at K = 2: tuned is longer (+0.444" in text


def test_the_verifier_alone_has_a_report_too():
    text = report.markdown(results(alone(), drafters=()), "acceptance.png")
    assert "verifier alone" in text


def test_the_plot_is_a_picture_for_any_number_of_runs(tmp_path: Path):
    for runs in ([alone()], [alone(), alone(prompts="b.jsonl"), a_run("base", answers(BASE))]):
        report.plot(results(*runs), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
