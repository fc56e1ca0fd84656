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
    assert "## Prompts: math\n\n12 prompts of `a.jsonl`, in domain.\n" in text
    assert "* tuned against base at K = 2: tuned is longer (+0.444" in text
    assert text.index("**tuned against base**") < text.index("## Prompts")


def test_one_difference_of_several_runs_is_told_once():
    def changed(token: int):
        found = answers(BASE)
        found[3].token_ids[0][token:] = [99] * (40 - token)
        return found

    found = results(
        alone(),
        a_run("base", changed(7), gaps={"p3": 0.1}),
        a_run("tuned", changed(7), gaps={"p3": 0.2}),
        a_run("third", changed(9)),
    )
    lines = [line for line in report.markdown(found, "a.png").splitlines() if line.startswith("First diff")]
    assert len(lines) == 2
    assert lines[0].startswith("First difference of base (K 2, 1 streams), tuned (K 2, 1 streams) from ")
    assert lines[0].endswith("(0.200 nats apart). Largest gap: 0.200 nats.")
    assert "token 9" in lines[1]


def test_the_verifier_alone_has_a_report_too():
    text = report.markdown(results(alone(), drafters=()), "acceptance.png")
    assert "verifier alone" in text


def test_the_plot_is_a_picture_for_any_number_of_runs(tmp_path: Path):
    for runs in ([alone()], [alone(), alone(prompts="b.jsonl"), a_run("base", answers(BASE))]):
        report.plot(results(*runs), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
