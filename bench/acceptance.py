"""Row 7: what finetuning by 04 is worth beside plain speculators and beside random weights, served by vLLM.

    python -m bench.acceptance
    python -m bench.acceptance --quick     # does it work
    python -m bench.acceptance --search    # every recipe of every side, on held-out rows

The head ../shared/checkpoints/smollm2-eagle3-midlayer was trained on answers to prompts_t0. 01 to 03 make
rows of another domain (prompts_self_instruct) and a draft vocabulary for it; each side then trains on these
rows, as many steps of as many tokens, by its first recipe below. 05 serves every drafter on prompts that no
side has seen, at temperature 0; vLLM counts. What was tried so far stands in this folder's README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bench import measure
from common import atomic_io, cli, demo_verifier
from common.errors import InputError
from common.evaluation import Run

SHARED = measure.ROOT.parent / "shared"
_TOKENS = 512  # of a packed batch
_HELD_OUT = 0.15  # share of the rows: 52 of 347, measured at each checkpoint
_K = 3
_RESAMPLES = 2000
_GOALS = {"speculators": ">= 1.7", "scratch": ">= 1.4"}

Recipe = tuple[str, ...]
# What --search compares; the first one of each side is served. Ours and scratch may use the same means.
# speculators' own defaults (muon, 1e-3, linear, all else as its command has it) come beside.
RECIPES: dict[str, tuple[Recipe, ...]] = {
    "ours": (
        ("--optimizer", "muon", "--lr", "1.5e-3"),
        ("--optimizer", "muon", "--lr", "1e-3"),
        ("--optimizer", "muon", "--lr", "2e-3"),
        ("--optimizer", "muon", "--lr", "3e-3"),
        ("--optimizer", "muon", "--lr", "4e-3"),
    ),
    "scratch": (
        ("--optimizer", "muon", "--lr", "1.6e-2"),
        ("--optimizer", "muon", "--lr", "8e-3"),
        ("--optimizer", "muon", "--lr", "4e-3"),
        ("--optimizer", "muon", "--lr", "2e-3"),
        ("--optimizer", "adamw", "--lr", "2e-3"),
        ("--optimizer", "adamw", "--lr", "4e-3"),
    ),
    "speculators": (
        ("--optimizer", "muon", "--lr", "8e-3", "--scheduler-type", "cosine"),
        ("--optimizer", "muon", "--lr", "1.6e-2", "--scheduler-type", "cosine"),
        ("--optimizer", "muon", "--lr", "4e-3", "--scheduler-type", "cosine"),
        ("--optimizer", "muon", "--lr", "2e-3", "--scheduler-type", "cosine"),
        ("--optimizer", "adamw", "--lr", "2e-3", "--scheduler-type", "cosine"),
    ),
}


def main() -> None:
    """Make the rows, train each side, serve them all, and print the lines; or search."""
    parser = measure.parser(__doc__, rows=347, quick=24, rounds=1)
    parser.add_argument(
        "--steps", type=cli.positive, help="of each training; default: 150 (one pass), 8 with --quick"
    )
    parser.add_argument("--head", type=Path, default=SHARED / "checkpoints/smollm2-eagle3-midlayer")
    parser.add_argument("--prompts", type=Path, default=SHARED / "data/prompts_self_instruct.jsonl")
    parser.add_argument("--search", action="store_true", help="train every recipe, measure held-out rows")
    args = measure.begin(parser)
    args.steps = args.steps or (8 if args.quick else 150)
    for path in (args.head, args.prompts):
        if not path.exists():
            raise InputError(f"{path} does not exist; pass --head and --prompts")
    demo_verifier.ensure()
    with measure.scratch() as folder:
        bench = Sides(args, folder)
        bench.make_rows()
        if args.search:
            search(bench)
        else:
            report(args, bench.serve(bench.train_all()))


def report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    """One line for each side beside ours."""
    lines = [
        measure.Line(
            *(7, f"accepted draft tokens a step, served, after {args.steps} steps"),
            *(f"{accepted(runs['ours']):.3f}", f"{side} {accepted(run):.3f}"),
            *(ratio(runs["ours"], run), _GOALS.get(side, "")),
        )
        for side, run in runs.items()
        if side != "ours"
    ]
    lengths = {side: 1 + accepted(run) for side, run in runs.items()}
    said = ", ".join(f"{side} {length:.3f}" for side, length in lengths.items())
    notes = [
        f"acceptance length, vLLM's counters, {_K} draft tokens: {said}",
        "the ratios' intervals are 95 % over prompts",
    ]
    measure.report(__file__, args, lines, notes, acceptance_lengths=lengths)


def search(bench: Sides) -> None:
    """Train each recipe of each side and print what it accepts on the held-out rows."""
    for side, recipes in RECIPES.items():
        for number, recipe in enumerate(recipes):
            found = bench.held_out(bench.train(side, recipe, f"{side}-{number}"))
            shares = " ".join(f"{share:.3f}" for share in found.by_position)
            print(f"{side} {' '.join(recipe)}: {found.length - 1:.4f} ({shares})", flush=True)


# ----------------------------------------------------------------------------------------------------------
# The sides


@dataclass
class Sides:
    """The rows that all sides train on, and the sides, in one folder.

    Attributes:
        args: of the command line.
        folder: gets a run folder a side; that of `rows` holds what 01 to 03 make.
    """

    args: argparse.Namespace
    folder: Path

    def make_rows(self) -> None:
        """01 to 03 on the second domain."""
        quick = self.args.quick
        prompts = ("--dataset", self.args.prompts, "--eval-prompts", 8 if quick else 80)
        self._stage("01_prepare_data.py", "rows", *prompts)
        answers = ("--max-tokens", 64 if quick else 192, "--limit", self.args.rows)
        self._stage("01b_generate_synthetic.py", "rows", *answers)
        self._stage("02_build_vocab_map.py", "rows")
        self._stage("03_capture_hidden.py", "rows")

    def train_all(self) -> dict[str, Path]:
        """The first recipe of each side, ours first; speculators' defaults and the head as it is.

        Returns:
            Drafters by name; `--quick` leaves out what only costs time.
        """
        sides = ("ours", "speculators") if self.args.quick else ("ours", "speculators", "scratch")
        drafters = {side: self.train(side, RECIPES[side][0], side) for side in sides}
        if not self.args.quick:
            drafters["speculators-defaults"] = self.train("speculators", (), "speculators-defaults")
            drafters["head"] = self.args.head
        return drafters

    def train(self, side: str, recipe: Sequence[str], name: str) -> Path:
        """Train one side with one recipe; its drafter.

        Args:
            side: of `RECIPES`.
            recipe: flags.
            name: of the run folder.
        """
        print(f"{name}: {' '.join(recipe)}", flush=True)
        if side == "speculators":
            return self._by_speculators(recipe, name)
        flags = ("--data-from", self.folder / "rows", "--eval-ratio", _HELD_OUT, "--total-seq-len", _TOKENS)
        steps = ("--max-steps", self.args.steps, "--epochs", self.args.steps)
        start = ("--finetune-from", self.args.head) if side == "ours" else ()
        self._stage("04_train.py", name, *flags, *steps, *start, *recipe)
        return self.folder / name / "drafter"

    def _by_speculators(self, recipe: Sequence[str], name: str) -> Path:
        """`speculators convert`, then `train --from-pretrained` on the same rows with the same map."""
        converted, rows = self.folder / "converted", self.folder / "rows"
        verifier = demo_verifier.ensure()
        if not converted.exists():
            flags = ("--verifier", verifier, "--algorithm", "eagle3", "--output-path", converted)
            self._speculators("convert", self.args.head, *flags)
        boundary, epochs = self._boundary_and_epochs()
        self._speculators(
            *("train", "--verifier-name-or-path", verifier, "--from-pretrained", converted),
            *("--data-path", rows / "dataset", "--hidden-states-path", rows / "hidden_states"),
            *("--d2t-path", rows / "vocab/d2t.npy", "--t2d-path", rows / "vocab/t2d.npy"),
            *("--on-missing", "raise", "--train-data-ratio", boundary, "--total-seq-len", _TOKENS),
            *("--max-steps", self.args.steps, "--epochs", epochs, "--save-path", self.folder / name),
            # What a CPU needs: no flex attention, no Triton losses; no reading processes on two cores.
            *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", 0),
            *recipe,
        )
        return self.folder / name / str(epochs - 1)

    def _boundary_and_epochs(self) -> tuple[float, int]:
        """The share of the rows that 04 trains on, and in which epoch the last step falls.

        speculators makes one step more for each epoch that is left after `--max-steps`.
        """
        rows, loader, _ = self._loaders()
        sampler = loader.batch_sampler
        ends = accumulate(len(sampler._generate_batches(epoch)) for epoch in range(self.args.steps))
        epochs = next(number for number, end in enumerate(ends, 1) if end >= self.args.steps)
        return (rows.boundary + 0.5) / len(rows.sources), epochs

    def _loaders(self) -> tuple[Any, Any, Any]:
        """The rows, and the loaders of the trained and of the held-out ones, with speculators' own seed."""
        import torch

        from common.hidden_states import HiddenStateStore
        from common.loaders import TrainingRows
        from common.verifier import Verifier

        folder = self.folder / "rows"
        store = HiddenStateStore(folder / "hidden_states", Verifier(str(demo_verifier.ensure())).hidden_size)
        rows = TrainingRows.open(
            folder / "dataset", store, failed=[], total_seq_len=_TOKENS, eval_ratio=_HELD_OUT
        )
        return rows, *rows.loaders(total_seq_len=_TOKENS, dtype=torch.bfloat16, num_workers=0, seed=42)

    def held_out(self, folder: Path) -> Any:
        """What a drafter accepts on the held-out rows, offline."""
        from common import drafter, processes
        from common.loaders import HeldOut
        from common.verifier import Verifier

        processes.start("cpu")
        rows, _, loader = self._loaders()
        verifier = Verifier(str(demo_verifier.ensure()))
        return HeldOut(rows, loader, verifier, _K).measure(drafter.load(folder, verifier))

    def serve(self, drafters: dict[str, Path]) -> dict[str, Run]:
        """05 on the held-out prompts; each side's run."""
        named = [flag for name, path in drafters.items() for flag in ("--drafter", f"{name}={path}")]
        tokens = ("--max-tokens", 32 if self.args.quick else 192, "--num-speculative-tokens", _K)
        flags = ("--concurrency", 16, "--min-acceptance-length", 1)
        self._stage("05_evaluate.py", "rows", *named, *tokens, *flags)
        kept = atomic_io.read_json_lines(self.folder / "rows/evaluation/runs.jsonl")
        return {run.drafter: run for run in map(Run.from_row, kept) if run.drafter}

    def _stage(self, script: str, run: str, *flags: object) -> None:
        """Run one of our stages in the run folder of that name, with the demo's settings."""
        config = ("--config", "configs/smollm2-demo.yaml", "--run-dir", self.folder / run)
        log_file = self.folder / f"{run}-{script}.log"
        spent = measure.command([sys.executable, script, *config, *flags], log_file)
        print(f"{run}: {script} {spent.seconds:.0f} s", flush=True)

    def _speculators(self, command: str, *flags: object) -> None:
        """Run one of speculators' commands, patched as `speculators_on_cpu` says."""
        call = [sys.executable, "-m", "bench.speculators_on_cpu", command, *flags]
        spent = measure.command(call, self.folder / f"speculators-{command}.log")
        print(f"speculators {command}: {spent.seconds:.0f} s", flush=True)


# ----------------------------------------------------------------------------------------------------------
# What vLLM counts


def accepted(run: Run) -> float:
    """Accepted draft tokens a verification step: acceptance length - 1, by the server's counters."""
    return sum(run.accepted) / run.drafts


def ratio(ours: Run, beside: Run) -> measure.Ratio:
    """The counters' ratio, and its 95 % interval over prompts (bootstrap of pairs)."""
    mine, theirs = ({answer.id: answer.acceptance(_K) for answer in run.answers} for run in (ours, beside))
    shared = sorted(mine.keys() & theirs.keys())
    drawn = np.random.default_rng(0).integers(len(shared), size=(_RESAMPLES, len(shared)))
    lengths = []
    for found in (mine, theirs):
        counts = np.array([(sum(found[key].accepted), found[key].drafts) for key in shared])
        sums = counts[drawn].sum(1)
        lengths.append(sums[:, 0] / sums[:, 1])
    low, high = np.quantile(lengths[0] / lengths[1], (0.025, 0.975))
    return measure.Ratio(accepted(ours) / accepted(beside), float(low), float(high))


if __name__ == "__main__":
    main()
