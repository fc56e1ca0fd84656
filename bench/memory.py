"""Row 8: the most memory that each stage and speculators' command for the same work hold at one time.

    python -m bench.memory
    python -m bench.memory --quick

Resident memory of the command and its children, shared pages counted once, looked at ten times a second;
servers are not counted. For 01, 02, 01b and 03 it is what rows 1 to 4 have noted; those that were not
measured yet are measured now, one round. 04 and `speculators train` train here: the same rows, draft
vocabulary, shape, optimizer and number of steps, the lm_head frozen and the load test in vLLM left out, as
speculators has no other way.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import capture, measure
from bench.measure import Line, Ratio, Spent
from common import atomic_io, demo_verifier
from common.hidden_states import HiddenStateStore
from common.verifier import Verifier

_GOAL = "<= 1.0"
_PACKED, _DRAFT_VOCAB = 512, 4096  # tokens of a batch and of the drafter, as in the demo
_PAIRS = {
    "01": ("prepare", "01", "prepare-data"),
    "02": ("vocab", "02", "speculators"),
    "01b": ("generate", "01b", "regenerate"),
    "03": ("capture", "03", "generate"),
}


def main() -> None:
    """Measure and report."""
    args = measure.begin(measure.parser(__doc__, rows=64, quick=12, rounds=1))
    lines = []
    for name, (script, ours, theirs) in _PAIRS.items():
        peaks = measured(script, args)["peaks"]
        lines.append(memory_line(name, peaks[ours], theirs, peaks[theirs]))
    model = Verifier(str(demo_verifier.ensure()))
    with measure.scratch() as folder:
        prepare(model, folder, args.rows)
        found = measure.alternate(
            {
                "04": lambda number: stage(model, folder, folder / f"ours-{number}"),
                "train": lambda number: train(model, folder, folder / f"theirs-{number}"),
            },
            args.rounds,
        )
    peaks = measure.peaks(found)
    lines.append(memory_line("04", peaks["04"], "speculators train", peaks["train"]))
    measure.report(__file__, args, lines)


def measured(script: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row's last result of the size that is asked for; without one the row is measured."""
    file = measure.RESULTS / f"{script}.json"
    if not file.exists() or atomic_io.read_json(file)["quick"] != args.quick:
        size = ("--quick",) if args.quick else ("--rounds", "1")
        subprocess.run([sys.executable, "-m", f"bench.{script}", *size], cwd=measure.ROOT, check=True)
    return atomic_io.read_json(file)


def memory_line(stage: str, ours: list[int], whose: str, theirs: list[int]) -> Line:
    """A line that compares peaks; figures are medians of the rounds."""
    mine, beside = (f"{statistics.median(peak) / 1e6:,.0f} MB" for peak in (ours, theirs))
    return Line(8, f"{stage}: peak memory", mine, f"{whose} {beside}", Ratio.of(ours, theirs), _GOAL)


def prepare(model: Verifier, folder: Path, rows: int) -> None:
    """A run folder that 04 can train on: random rows, random states, and the manifests of 02 and 03."""
    import torch

    from common import dataset

    capture.write_rows(folder / "dataset", rows, model.vocab_size)
    store = HiddenStateStore(folder / "hidden_states", model.hidden_size)
    store.folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    for number, row in enumerate(dataset.load(folder / "dataset")):
        ids = row["input_ids"]
        form = (len(ids), store.num_aux + 1, model.hidden_size)
        store.write(number, ids, torch.randn(form, generator=draw))
    where = ("--verifier", model.name, "--run-dir", folder)
    for script, flags in (
        ("02_build_vocab_map.py", ("--draft-vocab-size", _DRAFT_VOCAB)),
        # Every row is there: only the manifest is written.
        ("03_capture_hidden.py", ("--backend", "transformers")),
    ):
        measure.command((sys.executable, script, *where, *flags), folder / f"{script}.log")


def stage(model: Verifier, folder: Path, run_dir: Path) -> Spent:
    """Stage 04, from random weights, one pass."""
    data = ("--data-from", folder, "--verifier", model.name, "--run-dir", run_dir)
    # What speculators does not do is left out: its lm_head is frozen, and its drafter is not tried in vLLM.
    less = ("--no-train-lm-head", "--no-load-test")
    recipe = ("--epochs", 1, "--total-seq-len", _PACKED, "--lr", "1e-3", *less)
    return measure.command((sys.executable, "04_train.py", *data, *recipe), run_dir.with_suffix(".log"))


def train(model: Verifier, folder: Path, output: Path) -> Spent:
    """speculators' command, from random weights, one pass."""
    data = ("--data-path", folder / "dataset", "--hidden-states-path", folder / "hidden_states")
    vocab = ("--d2t-path", folder / "vocab" / "d2t.npy", "--t2d-path", folder / "vocab" / "t2d.npy")
    shape = ("--speculator-type", "eagle3", "--verifier-name-or-path", model.name, "--num-layers", 1)
    recipe = ("--epochs", 1, "--total-seq-len", _PACKED, "--optimizer", "adamw", "--lr", "1e-3")
    # What a CPU needs: no flex attention, no Triton losses; no reading processes, as 04 has none there.
    cpu = ("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", 0)
    rest = ("--on-missing", "raise", "--ttt-steps", 3, "--train-data-ratio", 0.95, "--save-path", output)
    command = (sys.executable, "-m", "bench.speculators_on_cpu", "train")
    flags = (*data, *vocab, *shape, *recipe, *cpu, *rest)
    return measure.command((*command, *flags), output.with_suffix(".log"))


if __name__ == "__main__":
    main()
