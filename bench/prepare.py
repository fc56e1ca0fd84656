"""Row 1: conversations -> token ids and loss masks: `01 --answers keep` beside `speculators prepare-data`.

    python -m bench.prepare
    python -m bench.prepare --quick

Both are whole commands, from the start of Python to the last file. prepare-data asks a vLLM server for every
prompt and every conversation; the server runs before the clock starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench import corpus, measure
from common import demo_verifier
from common.verifier import Verifier

if TYPE_CHECKING:
    import datasets

    from bench.measure import Spent

_LONGEST = 2048  # tokens of a row; none comes near it


def main() -> None:
    """Measure and report."""
    args = measure.begin(measure.parser(__doc__, rows=20_000, quick=200, rounds=2))
    model = Verifier(str(demo_verifier.ensure()))
    flags = ["--enable-scale-out"]  # without it vLLM 0.32 answers 403 to /render, and no row is made
    with measure.scratch() as folder, measure.server(model, flags, folder / "server.log") as url:
        few, all_rows = folder / "few.jsonl", folder / "rows.jsonl"
        corpus.write_conversations(few, 20, model)
        corpus.write_conversations(all_rows, args.rows, model)

        def data(number: int) -> Path:
            # The round that is thrown away only wakes the server up.
            return all_rows if number else few

        found = measure.alternate(
            {
                "01": lambda number: ours(data(number), model, folder / f"ours-{number}"),
                "prepare-data": lambda number: theirs(data(number), model, url, folder / f"theirs-{number}"),
            },
            args.rounds,
            thrown_away=1,
        )
        same = agreement(model, folder / f"ours-{args.rounds}" / "dataset", folder / f"theirs-{args.rounds}")
    what = f"tokens and masks of {args.rows:,} conversations"
    line = measure.time_line(1, what, found["01"], found["prepare-data"], "prepare-data", "<= 0.5")
    measure.report(__file__, args, [line], [same], peaks=measure.peaks(found))


def ours(data: Path, model: Verifier, run_dir: Path) -> Spent:
    """Stage 01 as its user runs it, with its default number of processes."""
    what = ("--dataset", data, "--answers", "keep", "--eval-prompts", 0, "--max-length", _LONGEST)
    command = (sys.executable, "01_prepare_data.py", *what, "--verifier", model.name, "--run-dir", run_dir)
    return measure.command(command, run_dir.with_suffix(".log"))


def theirs(data: Path, model: Verifier, url: str, output: Path) -> Spent:
    """prepare-data with its defaults; `datasets` gets a fresh cache, or the second round would read less."""
    what = ("--data", data, "--render-endpoint", url.removesuffix("/v1"), "--seq-length", _LONGEST)
    command = (*measure.SPECULATORS, "prepare-data", *what, "--model", model.name, "--output", output)
    cache = output.with_suffix(".cache")
    return measure.command(command, output.with_suffix(".log"), HF_DATASETS_CACHE=str(cache))


def agreement(model: Verifier, ours: Path, theirs: Path) -> str:
    """Whether both made the same rows; what the template writes after the stop token is theirs alone."""
    import datasets

    mine, beside = (answers(datasets.load_from_disk(str(folder)), model) for folder in (ours, theirs))
    assert mine == beside, f"{len(mine ^ beside)} of {len(mine | beside)} rows differ"
    return (
        f"both made the same {len(mine):,} rows, token for token and mask for mask up to the stop token; "
        "prepare-data also supervises the line break behind it, which the template writes and no server"
    )


def answers(rows: datasets.Dataset, model: Verifier) -> set[tuple[int, bytes]]:
    """Every row as (prompt tokens, ids up to the last stop token)."""
    stops = set(model.stop_ids)
    found = set()
    for row in rows.with_format("numpy"):
        ids, mask = row["input_ids"], row["loss_mask"]
        end = max(index for index, token in enumerate(ids.tolist()) if token in stops)
        found.add((int((mask == 0).sum()), ids[: end + 1].astype("int32").tobytes()))
    return found


if __name__ == "__main__":
    main()
