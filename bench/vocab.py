"""Row 2: count tokens, choose the draft vocabulary: `02` beside speculators' counting and mapping functions.

    python -m bench.vocab
    python -m bench.vocab --quick

`--rows` is millions of tokens. Two lines: whole processes from the start of Python to the last file (ours
also loads the tokenizer and draws the coverage; no command of speculators does only this, so its process
calls the two functions), and the seconds inside of the functions.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import corpus, measure
from bench.measure import Spent
from common import demo_verifier, log
from common.verifier import Verifier

if TYPE_CHECKING:
    import numpy as np

_SIZE = 32_000
_GOAL = "<= 0.05"
_ALONE = "seconds"


def main() -> None:
    """Measure and report."""
    args = measure.begin(measure.parser(__doc__, rows=50, quick=1, rounds=2))
    model = Verifier(str(demo_verifier.ensure()))
    with measure.scratch() as folder:
        rows = folder / "dataset"
        tokens = corpus.write_rows(rows, args.rows * 1_000_000, model)

        def calling(function: str) -> measure.Side:
            def side(number: int) -> Spent:
                output = folder / f"{function}-{number}"
                call = f"from bench import vocab; vocab.{function}({str(rows)!r}, {str(output)!r})"
                return measure.command((sys.executable, "-c", call), output.with_suffix(".log"))

            return side

        found = measure.alternate(
            {
                "02": lambda number: stage(rows, model, folder / f"run-{number}"),
                "functions": calling("our_functions"),
                "speculators": calling("their_functions"),
            },
            args.rounds,
            thrown_away=1,  # it reads the rows from the disk, the others find them in memory
        )
        ours, theirs = (
            [Spent(float((folder / f"{function}-{number}" / _ALONE).read_text())) for number in kept]
            for kept in [range(1, args.rounds + 1)]
            for function in ("our_functions", "their_functions")
        )
        _require_equal(*(folder / name for name in ("run-1/vocab", "our_functions-1", "their_functions-1")))
    work = f"count {log.human_count(tokens)} tokens, choose {_SIZE:,} of {model.vocab_size:,}"
    lines = [
        measure.time_line(2, work, found["02"], found["speculators"], "a process of its functions", _GOAL),
        measure.time_line(2, "the same, inside of the functions", ours, theirs, "its functions", _GOAL),
    ]
    measure.report(__file__, args, lines, ["both sides' maps are equal"], peaks=measure.peaks(found))


def stage(rows: Path, model: Verifier, run_dir: Path) -> Spent:
    """Stage 02 as its user runs it."""
    run_dir.mkdir()
    (run_dir / "dataset").symlink_to(rows)
    flags = ("--verifier", model.name, "--draft-vocab-size", _SIZE, "--run-dir", run_dir)
    return measure.command((sys.executable, "02_build_vocab_map.py", *flags), run_dir.with_suffix(".log"))


def our_functions(rows: str, output: str) -> None:
    """What stage 02 does between opening the data set and writing files; in a process of its own."""
    from common import dataset
    from common.draft_vocab import DraftVocab

    count_supervised = importlib.import_module("02_build_vocab_map").count_supervised
    model = Verifier(str(demo_verifier.ensure()))
    stored, vocab_size = dataset.load(Path(rows)), model.vocab_size
    begun = time.perf_counter()
    vocab = DraftVocab.most_frequent(count_supervised(stored, vocab_size), _SIZE, model.stop_ids)
    _save(output, time.perf_counter() - begun, vocab.d2t, vocab.t2d)


def their_functions(rows: str, output: str) -> None:
    """speculators' own: what prepare-data counts with and what train chooses with."""
    import datasets
    import torch
    from speculators.train import vocab_mapping as theirs

    model = Verifier(str(demo_verifier.ensure()))
    stored, vocab_size = datasets.load_from_disk(rows), model.vocab_size
    counts = Path(output) / "token_freq.pt"
    begun = time.perf_counter()
    theirs.save_token_frequency_distribution(stored, counts)
    d2t, t2d = theirs.build_vocab_mappings_from_distribution(
        torch.load(counts, weights_only=True), _SIZE, vocab_size
    )
    _save(output, time.perf_counter() - begun, d2t.numpy(), t2d.numpy())


def _save(folder: str, seconds: float, d2t: np.ndarray, t2d: np.ndarray) -> None:
    import numpy as np

    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / _ALONE).write_text(repr(seconds))
    np.save(Path(folder) / "d2t.npy", d2t)
    np.save(Path(folder) / "t2d.npy", t2d)


def _require_equal(*folders: Path) -> None:
    import numpy as np

    for name in ("d2t.npy", "t2d.npy"):
        first, *others = (np.load(folder / name) for folder in folders)
        assert all(np.array_equal(first, other) for other in others), f"{name} differs"


if __name__ == "__main__":
    main()
