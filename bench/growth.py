"""Row 9: once, four times and sixteen times the rows through 01, 02 and 03's bookkeeping: time and memory.

    python -m bench.growth
    python -m bench.growth --quick

Time grows as `start + a x rows^p`; from three times it follows that `p = log4((t16 - t4) / (t4 - t1))`,
whatever the start takes: 1 is linear. Memory's exponent is `log16(m16 / m1)`: 0 is flat. `--rows` is for 01's
prompts; a tenth of them go through 01 --answers keep, a fourth through 03's bookkeeping (its files are there
already: plan, headers, counts, manifest), and through 02 goes a row of 1,100 tokens for each four.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench import corpus, measure
from bench.measure import Line, Ratio, Spent
from common import dataset, demo_verifier
from common.hidden_states import HiddenStateStore
from common.verifier import Verifier

_TIMES = (1, 4, 16)
_SIZES = "1x / 4x / 16x the rows"
_TIME_GOAL, _MEMORY_GOAL = "<= 1.1", "<= 0.1"
_TOKENS = 2  # of a row in 03's bookkeeping, which looks at headers only
_LINKS = 10_000  # names that one file has at most
Work = Callable[[Verifier, int, Path], Spent]


def main() -> None:
    """Measure and report."""
    args = measure.begin(measure.parser(__doc__, rows=10_000, quick=200, rounds=1))
    model = Verifier(str(demo_verifier.ensure()))
    works: dict[str, Work] = {
        "01, prompts": prompts,
        "01 --answers keep": kept_answers,
        "02": count,
        "03's bookkeeping": bookkeeping,
    }
    lines: list[Line] = []
    for name, work in works.items():
        found = []
        for times in _TIMES:
            rounds = [run(work, model, args.rows * times) for _ in range(args.rounds)]
            # The least of several rounds is the one that other work disturbed least.
            found.append(min(rounds, key=lambda spent: spent.seconds))
            print(f"{name}, {times}x: {found[-1]}", flush=True)
        lines += growth_lines(name, found)
    measure.report(__file__, args, lines)


def run(work: Work, model: Verifier, rows: int) -> Spent:
    """Make so many rows and let a stage work through them."""
    with measure.scratch() as folder:
        return work(model, rows, folder)


def time_exponent(once: float, four: float, sixteen: float) -> float:
    """The p of `start + a x rows^p`, from the seconds of one, four and sixteen times the rows."""
    if min(four - once, sixteen - four) <= 0:  # nothing but noise grew
        return math.log(sixteen / four, 4)
    return math.log((sixteen - four) / (four - once), 4)


def growth_lines(name: str, found: list[Spent]) -> list[Line]:
    """The exponents of time and memory; `found` is what 1x, 4x and 16x took."""
    linear = time_exponent(*(spent.seconds for spent in found))
    seconds = " / ".join(f"{spent.seconds:.2f}" for spent in found)
    megabytes = " / ".join(f"{spent.peak_bytes / 1e6:.0f}" for spent in found)
    flat = math.log(found[2].peak_bytes / found[0].peak_bytes, 16)
    return [
        Line(
            *(9, f"{name}: exponent of time", f"{seconds} s", _SIZES),
            *(Ratio(linear, linear, linear), _TIME_GOAL),
        ),
        Line(
            *(9, f"{name}: exponent of memory", f"{megabytes} MB", _SIZES),
            *(Ratio(flat, flat, flat), _MEMORY_GOAL),
        ),
    ]


def prompts(model: Verifier, rows: int, folder: Path) -> Spent:
    """01: read, normalise, de-duplicate, hold out, write."""
    corpus.write_conversations(folder / "rows.jsonl", rows, model)
    return _prepare(folder)


def kept_answers(model: Verifier, rows: int, folder: Path) -> Spent:
    """01 --answers keep: the same, and token ids and masks."""
    corpus.write_conversations(folder / "rows.jsonl", rows // 10, model)
    return _prepare(folder, "--answers", "keep", "--verifier", model.name)


def _prepare(folder: Path, *flags: str) -> Spent:
    command = (
        sys.executable,
        "01_prepare_data.py",
        "--dataset",
        folder / "rows.jsonl",
        *flags,
        "--eval-prompts",
        5,
    )
    return measure.command((*command, "--run-dir", folder / "run"), folder / "log")


def count(model: Verifier, rows: int, folder: Path) -> Spent:
    """02: count the supervised tokens, choose, draw."""
    corpus.write_rows(folder / "dataset", rows // 4 * 1100, model)
    flags = ("--verifier", model.name, "--draft-vocab-size", 32_000, "--run-dir", folder)
    return measure.command((sys.executable, "02_build_vocab_map.py", *flags), folder / "log")


def bookkeeping(model: Verifier, rows: int, folder: Path) -> Spent:
    """03 on a store that holds every row and has no manifest yet: what it does beside computing states."""
    import torch

    rows //= 4
    ids = [100 + number for number in range(_TOKENS)]
    dataset.write(
        folder / "dataset",
        (
            {
                "input_ids": ids,
                "loss_mask": [1] * _TOKENS,
                "seq_len": _TOKENS,
                "id": f"{number}#0",
                "source": "bench",
            }
            for number in range(rows)
        ),
    )
    store = HiddenStateStore(folder / "hidden_states", model.hidden_size)
    store.folder.mkdir()
    for first in range(0, rows, _LINKS):
        store.write(first, torch.tensor(ids), torch.ones(_TOKENS, store.num_aux + 1, model.hidden_size))
        for row in range(first + 1, min(rows, first + _LINKS)):
            os.link(store.path(first), store.path(row))
    flags = ("--backend", "transformers", "--verifier", model.name, "--run-dir", folder)
    return measure.command((sys.executable, "03_capture_hidden.py", *flags), folder / "log")


if __name__ == "__main__":
    main()
