"""Row 5: what each form of the store costs: acceptance after training, bytes a token, reading, writing.

    python -m bench.store_forms            # after make demo: its code and arithmetic run, its base head
    python -m bench.store_forms --run-dir RUN --finetune-from HEAD
    python -m bench.store_forms --quick    # sizes and rates only

The run's plain bfloat16 states are stored again in each form. For each precision 04 trains the same head from
them, with the same seed (what compression packs is equal bit by bit, which is checked). Every drafter is then
measured on the held-out rows' bfloat16 states, as a server has them. Rates are of one thread, in bytes of
bfloat16 states for a second of its processor.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench import measure
from bench.measure import Line, Ratio
from common import manifest
from common.acceptance import Acceptance
from common.hidden_states import HiddenStateStore
from common.store_forms import COMPRESSIONS, PRECISIONS, StoreForm
from common.verifier import Verifier

_DEMO = measure.ROOT / "runs" / "demo"
_SEQ_LEN, _TTT_STEPS = 512, 3
_BYTES_GOAL, _LENGTH_GOAL = "<= 0.45", ">= 0.995"


def main() -> None:
    """Measure and report."""
    parser = measure.parser(__doc__, rows=1_000_000, quick=40, rounds=1)
    parser.add_argument("--run-dir", type=Path, default=_DEMO / "finetuned", help="with plain states")
    parser.add_argument("--finetune-from", type=Path, default=_DEMO / "base" / "specforge", help="the head")
    parser.add_argument("--epochs", type=int, default=3, help="passes of 04 over the rows that train")
    parser.add_argument("--eval-ratio", type=float, default=0.15, help="share of the rows held out")
    args = measure.begin(parser)
    made = manifest.read(args.run_dir / "hidden_states", "make demo, or 03_capture_hidden.py")
    model = Verifier(made.facts["verifier"])
    plain = HiddenStateStore.made_with(made.facts, args.run_dir / "hidden_states", model.hidden_size)
    rows = sorted(int(path.stem[3:]) for path in plain.folder.glob("hs_*"))[: args.rows]
    lines, lengths, notes = [], {}, []
    with measure.scratch() as folder:
        for form in (StoreForm(dtype, compress) for dtype in PRECISIONS for compress in COMPRESSIONS):
            store = replace(plain, folder=folder / str(form) / "hidden_states", form=form)
            shown, ratio = stored_again(plain, store, rows)
            lines.append(Line(5, f"{form}: bytes a token", *shown, ratio, _BYTES_GOAL))
            if not args.quick and form.compress == "none":
                seconds, found = trained(args, made, plain, store, model)
                lengths[form.dtype] = found
                notes.append(f"{form.dtype}: acceptance length {found.length:.4f}, 04 took {seconds:.0f} s")
    for dtype, found in lengths.items():
        ratio = Ratio.of([found.length], [lengths["bfloat16"].length])
        beside = f"bfloat16 {lengths['bfloat16'].length:.3f}"
        lines.append(
            Line(5, f"{dtype}: acceptance length", f"{found.length:.3f}", beside, ratio, _LENGTH_GOAL)
        )
    measure.report(__file__, args, lines, notes)


def stored_again(
    plain: HiddenStateStore, store: HiddenStateStore, rows: list[int]
) -> tuple[tuple[str, str], Ratio]:
    """Write the rows in another form and read them back.

    Returns:
        Our figures and bfloat16's bytes a token for the table, and the ratio of the bytes.
    """
    import torch

    torch.set_num_threads(1)
    store.folder.mkdir(parents=True)
    tokens = states_bytes = 0
    seconds = {"write": 0.0, "read": 0.0}
    for row in rows:
        token_ids, states = plain.read(row)
        tokens, states_bytes = tokens + len(token_ids), states_bytes + states.nbytes
        states = states.clone()  # read from the disk before the clock
        begun = time.process_time()
        with store.storing(row, token_ids, states) as kept:
            pass
        written = time.process_time()
        found = store.read(row)[1]
        seconds["read"] += time.process_time() - written
        seconds["write"] += written - begun
        assert torch.equal(found, kept), f"row {row} is not what was stored"
    sizes = [
        sum(path.stat().st_size for path in (folder / f"hs_{row}.safetensors" for row in rows))
        for folder in (store.folder, plain.folder)
    ]
    rates = ", ".join(f"{way} {states_bytes / spent / 1e6:.0f} MB/s" for way, spent in seconds.items())
    each, beside = (size / tokens for size in sizes)
    return (f"{each:.0f} B ({rates})", f"bfloat16 {beside:.0f} B"), Ratio.of([each], [beside])


def trained(
    args: argparse.Namespace,
    made: manifest.Manifest,
    plain: HiddenStateStore,
    store: HiddenStateStore,
    model: Verifier,
) -> tuple[float, Acceptance]:
    """Train from a store, and measure the drafter on the held-out rows as `plain` has them."""
    from common import drafter
    from common.loaders import HeldOut, TrainingRows
    from common.processes import start

    folder = store.folder.parent
    for name in ("dataset", "vocab"):
        (folder / name).symlink_to((args.run_dir / name).resolve())
    replace(made, facts={**made.facts, **store.form.facts()}).write(store.folder)
    recipe = {
        "--config": "configs/smollm2-demo.yaml",
        "--verifier": model.name,
        "--run-dir": folder,
        "--finetune-from": args.finetune_from,
        "--epochs": args.epochs,
        "--eval-ratio": args.eval_ratio,
        "--lr": 5e-4,
        "--total-seq-len": _SEQ_LEN,
        "--ttt-steps": _TTT_STEPS,
        "--seed": 0,
    }
    flags = [part for pair in recipe.items() for part in pair]
    spent = measure.command((sys.executable, "04_train.py", *flags), folder / "04.log")
    _, dtype = start("cpu")
    rows = TrainingRows.open(
        args.run_dir / "dataset",
        plain,
        failed=[int(row) for row in made.counts["failures"]],
        total_seq_len=_SEQ_LEN,
        eval_ratio=args.eval_ratio,
    )
    _, held_out = rows.loaders(total_seq_len=_SEQ_LEN, dtype=dtype, num_workers=0, seed=0)
    found = HeldOut(rows, held_out, model, _TTT_STEPS).measure(drafter.load(folder / "drafter", model))
    shutil.rmtree(folder / "checkpoints")
    return spent.seconds, found


if __name__ == "__main__":
    main()
