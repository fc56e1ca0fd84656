"""Row 7: what finetuning by 04 is worth beside plain speculators and beside random weights, served by vLLM.

    python -m bench.acceptance             # 25 minutes on two cores
    python -m bench.acceptance --quick     # does it work: three minutes

The head ../shared/checkpoints/smollm2-eagle3-midlayer was trained on answers to prompts_t0. 01 to 03 make
rows of another domain (prompts_self_instruct) and a draft vocabulary for it; each side then trains on these
rows, as many steps of as many tokens, at the settings that were best for it (the search is in this folder's
README.md). 05 serves every drafter on prompts that no side has seen, at temperature 0; vLLM counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from bench import measure
from common import atomic_io
from common.errors import InputError
from common.evaluation import Run
from common.hidden_states import HiddenStateStore
from common.loaders import TrainingRows
from common.verifier import Verifier

SHARED = measure.ROOT.parent / "shared"
VERIFIER = measure.ROOT / "models/smollm2-135m-instruct"
CONFIG = ("--config", measure.ROOT / "configs/smollm2-demo.yaml")
_TOKENS = 512  # of a packed batch
_HELD_OUT = 0.15  # share of the rows: 52, measured at each checkpoint
_K = 3
_RESAMPLES = 2000

# The best of each side.
_OURS = ("--lr", "8e-4")
_SCRATCH = ("--lr", "1e-3")
_SPECULATORS = ("--optimizer", "adamw", "--lr", "1e-3", "--scheduler-type", "cosine")
_GOALS = {"speculators": ">= 1.7", "scratch": ">= 1.4"}


def main() -> None:
    """Make the rows, train each side, serve them all, and print the lines."""
    parser = measure.parser(__doc__, rows=347, quick=24, rounds=1)
    parser.add_argument("--steps", type=int, help="of each training; default: 300, 8 with --quick")
    parser.add_argument("--head", type=Path, default=SHARED / "checkpoints/smollm2-eagle3-midlayer")
    parser.add_argument("--prompts", type=Path, default=SHARED / "data/prompts_self_instruct.jsonl")
    args = measure.begin(parser)
    args.steps = args.steps or (8 if args.quick else 300)
    for path in (args.head, args.prompts, VERIFIER):
        if not path.exists():
            raise InputError(f"{path} does not exist: row 7 needs the head, the prompts and the verifier")
    with measure.scratch() as folder:
        make_rows(args, folder)
        drafters = train_all(args, folder)
        runs = serve(args, folder, drafters)
    lines = [
        measure.Line(
            7,
            f"accepted draft tokens a step, served, after {args.steps} steps",
            f"{accepted(runs['ours']):.3f}",
            f"{side.replace('_', ' ')} {accepted(runs[side]):.3f}",
            ratio(runs["ours"], runs[side]),
            _GOALS.get(side, ""),
        )
        for side in drafters
        if side != "ours"
    ]
    lengths = {side: 1 + accepted(run) for side, run in runs.items()}
    notes = ["acceptance lengths: " + ", ".join(f"{side} {value:.3f}" for side, value in lengths.items())]
    measure.report(__file__, args, lines, notes, acceptance_lengths=lengths)


# ----------------------------------------------------------------------------------------------------------
# The rows that all sides train on


def make_rows(args: argparse.Namespace, folder: Path) -> None:
    """01 to 03 on the second domain, in `folder`/rows."""
    prompts = 8 if args.quick else 80
    tokens = 64 if args.quick else 192
    stage(folder, "01_prepare_data.py", "rows", "--dataset", args.prompts, "--eval-prompts", prompts)
    stage(folder, "01b_generate_synthetic.py", "rows", "--max-tokens", tokens, "--limit", args.rows)
    stage(folder, "02_build_vocab_map.py", "rows")
    backend = ("--backend", "transformers", "--no-serve") if args.quick else ()
    stage(folder, "03_capture_hidden.py", "rows", *backend)


def stage(folder: Path, script: str, run: str, *flags: object) -> None:
    """Run one of our stages in the run folder `folder`/`run`, with the demo's settings."""
    print(f"{run}: {script} {' '.join(map(str, flags))}", flush=True)
    log_file = folder / f"{run}-{script}.log"
    measure.command([sys.executable, script, *CONFIG, "--run-dir", folder / run, *flags], log_file)


# ----------------------------------------------------------------------------------------------------------
# The sides


def train_all(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Train each side; its drafter by name, ours first. `--quick` leaves out what only costs time."""
    common = ("--max-steps", args.steps, "--epochs", args.steps, "--total-seq-len", _TOKENS)
    ours = (*common, "--data-from", folder / "rows", "--eval-ratio", _HELD_OUT)
    stage(folder, "04_train.py", "ours", *ours, "--finetune-from", args.head, *_OURS)
    drafters = {"ours": folder / "ours/drafter"}
    speculators(folder, "convert", args.head, "--verifier", VERIFIER, "--algorithm", "eagle3")
    drafters["speculators"] = finetune_by_speculators(args, folder, "speculators", _SPECULATORS)
    if not args.quick:
        drafters["speculators_defaults"] = finetune_by_speculators(args, folder, "speculators_defaults", ())
        stage(folder, "04_train.py", "scratch", *ours, *_SCRATCH)
        drafters |= {"scratch": folder / "scratch/drafter", "start": args.head}
    return drafters


def finetune_by_speculators(args: argparse.Namespace, folder: Path, name: str, recipe: Sequence[str]) -> Path:
    """`speculators train --from-pretrained` on the same rows with the same map; its last checkpoint.

    Args:
        recipe: optimizer, rate and schedule; empty for its defaults.
    """
    rows, boundary, epochs = split_and_epochs(args, folder)
    speculators(
        *(folder, "train", "--verifier-name-or-path", VERIFIER),
        *("--from-pretrained", folder / "converted", "--data-path", folder / "rows/dataset"),
        *("--hidden-states-path", folder / "rows/hidden_states", "--on-missing", "raise"),
        *("--d2t-path", folder / "rows/vocab/d2t.npy", "--t2d-path", folder / "rows/vocab/t2d.npy"),
        *("--train-data-ratio", (boundary + 0.5) / rows, "--total-seq-len", _TOKENS),
        *("--max-steps", args.steps, "--epochs", epochs, "--save-path", folder / name),
        # What a CPU needs: no flex attention, no Triton losses; no reading processes on two cores.
        *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", 0),
        *recipe,
    )
    return folder / name / str(epochs - 1)


def speculators(folder: Path, command: str, *flags: object) -> None:
    """Run one of speculators' commands, patched as `speculators_on_cpu` says."""
    print(f"speculators {command} {' '.join(map(str, flags))}", flush=True)
    output = ("--output-path", folder / "converted") if command == "convert" else ()
    call = [sys.executable, "-m", "bench.speculators_on_cpu", command, *flags, *output]
    measure.command(call, folder / f"speculators-{command}.log")


def split_and_epochs(args: argparse.Namespace, folder: Path) -> tuple[int, int, int]:
    """Rows, how many of them 04 trains on, and in which epoch the last step falls.

    speculators goes on with one step for each epoch that is left after `--max-steps`.
    """
    store = HiddenStateStore(folder / "rows/hidden_states", Verifier(str(VERIFIER)).hidden_size)
    rows = TrainingRows.open(
        folder / "rows/dataset", store, failed=[], total_seq_len=_TOKENS, eval_ratio=_HELD_OUT
    )
    import torch

    loader, _ = rows.loaders(total_seq_len=_TOKENS, dtype=torch.bfloat16, num_workers=0, seed=42)
    sampler = loader.batch_sampler
    ends = accumulate(len(sampler._generate_batches(epoch)) for epoch in range(args.steps))  # type: ignore[union-attr]
    return len(rows.sources), rows.boundary, next(e for e, end in enumerate(ends, 1) if end >= args.steps)


# ----------------------------------------------------------------------------------------------------------
# What vLLM counts


def serve(args: argparse.Namespace, folder: Path, drafters: dict[str, Path]) -> dict[str, Run]:
    """05 on the held-out prompts; each side's run."""
    named = [flag for name, path in drafters.items() for flag in ("--drafter", f"{name}={path}")]
    tokens = 32 if args.quick else 192
    flags = (*named, "--max-tokens", tokens, "--concurrency", 16, "--min-acceptance-length", 1)
    stage(folder, "05_evaluate.py", "rows", *flags, "--num-speculative-tokens", _K)
    runs = map(Run.from_row, atomic_io.read_json_lines(folder / "rows/evaluation/runs.jsonl"))
    return {run.drafter: run for run in runs if run.drafter}


def accepted(run: Run) -> float:
    """Accepted draft tokens a verification step: acceptance length - 1, by the server's counters."""
    return sum(run.accepted) / run.drafts


def ratio(ours: Run, beside: Run) -> measure.Ratio:
    """The counters' ratio, and its 95 % interval over prompts (a paired bootstrap)."""
    counts = {}
    for name, run in (("ours", ours), ("beside", beside)):
        each = {answer.id: answer.acceptance(_K) for answer in run.answers}
        counts[name] = {key: (sum(found.accepted), found.drafts) for key, found in each.items()}
    shared = sorted(counts["ours"].keys() & counts["beside"].keys())
    drawn = np.random.default_rng(0).integers(len(shared), size=(_RESAMPLES, len(shared)))
    sums = {name: np.array([found[key] for key in shared])[drawn].sum(1) for name, found in counts.items()}
    resampled = (sums["ours"][:, 0] / sums["ours"][:, 1]) / (sums["beside"][:, 0] / sums["beside"][:, 1])
    low, high = np.quantile(resampled, (0.025, 0.975))
    return measure.Ratio(accepted(ours) / accepted(beside), float(low), float(high))


if __name__ == "__main__":
    main()
