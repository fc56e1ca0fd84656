"""Captured states -> a drafter, from scratch or from a public EAGLE-3 head, measured before and after.

Kimi-K2.5, a public head finetuned on eight GPUs:
  torchrun --standalone --nproc-per-node 8 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
what would be imported, and what is it worth on this data? (no folder is touched)
  python 04_train.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --dry-run --report-json report.json
a laptop CPU, from scratch:
  python 04_train.py --run-dir runs/laptop --lr 1e-3 --epochs 4 --total-seq-len 512
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from common import atomic_io, cli, head_flags, manifest, training_plan, verifier
from common.errors import InputError
from common.shards import Shard

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from common.acceptance import Acceptance

_FINETUNE_LR, _SCRATCH_LR = 2e-5, 1e-4


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    flag = argparse.BooleanOptionalAction
    data = parser.add_argument_group("Data")
    data.add_argument(
        "--data-from", type=Path, metavar="RUN_DIR", help="run folder to read from; default: --run-dir"
    )
    data.add_argument(
        "--eval-ratio", type=float, default=0.05, help="share of the rows to hold out, from the end"
    )
    data.add_argument(
        "--total-seq-len", type=int, default=4096, help="tokens of a packed batch on each device"
    )
    data.add_argument(
        "--num-workers", type=int, help="processes that read states; default: 4 beside a GPU, 0 on a CPU"
    )
    data.add_argument(
        "--hidden-states",
        choices=("stored", "online"),
        default="stored",
        help="online: no 03; each row's states come from the server of --endpoint when the row is trained",
    )
    data.add_argument(
        "--endpoint",
        metavar="URL",
        help="for --hidden-states online: the server that `03_capture_hidden.py --print-server` starts",
    )
    data.add_argument(
        "--shared-folder",
        type=Path,
        metavar="FOLDER",
        help="the only folder that files of --endpoint are taken from; "
        "default: RUN_DIR/hidden_states/.incoming",
    )
    data.add_argument(
        "--layer-ids",
        type=int,
        nargs=3,
        metavar="ID",
        help="for --hidden-states online: as in 03; "
        "default: what the data set's stage recorded, else 2, N//2, N-3",
    )
    data.add_argument(
        "--shard",
        type=Shard.parse,
        metavar="I/N",
        help="train --epochs passes over the I-th of N parts of the rows, in turn with 03 --shard; one run "
        "with one schedule goes through all N, and the last one writes drafter/",
    )
    data.add_argument(
        "--loader-memory",
        type=float,
        metavar="GB",
        help="shared memory for batches that are read ahead, of all processes of a machine (10^9 bytes); "
        "sets how many are; default: half of what /dev/shm has free",
    )
    head_flags.add_warm_start_arguments(parser)
    head_flags.add_layer_arguments(parser)
    recipe = parser.add_argument_group("Optimisation")
    recipe.add_argument(
        "--lr",
        type=float,
        help=f"highest learning rate; default: {_FINETUNE_LR} finetuning, {_SCRATCH_LR} from scratch",
    )
    recipe.add_argument("--epochs", type=int, default=3, help="passes over the rows")
    recipe.add_argument(
        "--max-steps", type=int, help="steps after which training stops for good; the schedule ends there"
    )
    recipe.add_argument(
        "--max-time",
        type=cli.seconds,
        metavar="TIME",
        help="3h, 90m, 45s or seconds after which no further step begins. Checkpoints and measures between "
        "steps count, those at the end do not, nor what a kill undid. The schedule follows the greater share "
        "of steps or time and ends there; as speed varies, no two such runs are equal bit by bit",
    )
    recipe.add_argument(
        "--gradient-accumulation-steps",
        type=int,
        default=1,
        metavar="N",
        help="packed batches of a step on each device; gradients are averaged",
    )
    recipe.add_argument("--ttt-steps", type=int, default=3, help="draft tokens in a chain")
    recipe.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="as in speculators")
    recipe.add_argument("--weight-decay", type=float, default=0.01, help="of adamw, as a share of the rate")
    recipe.add_argument(
        "--scheduler",
        choices=("cosine", "linear", "constant"),
        default="cosine",
        help="learning rate after the warm-up; cosine and linear reach 0 at the last step",
    )
    recipe.add_argument("--warmup-ratio", type=float, default=0.05, help="share of the steps")
    recipe.add_argument(
        "--train-lm-head", action=flag, default=True, help="train the drafter's output rows as well"
    )
    recipe.add_argument(
        "--anchor",
        type=float,
        default=0.0,
        metavar="W",
        help="pull towards the imported weights, against forgetting: each step takes back rate x W of the "
        "way; 0: none",
    )
    recipe.add_argument("--seed", type=int, default=0, help="of new weights and of the order of the rows")
    run = parser.add_argument_group("Running")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    run.add_argument(
        "--fsdp",
        action=flag,
        default=False,
        help="under torchrun: share weights, gradients and moments out among the devices; checkpoints are "
        "the same, so a run may go on with or without it",
    )
    run.add_argument(
        "--resume", action=flag, default=True, help="go on from the newest checkpoint; --no-resume drops it"
    )
    run.add_argument(
        "--save-every", type=int, default=1000, help="steps between checkpoints; each epoch ends with one"
    )
    run.add_argument("--keep-last", type=int, default=2, help="newest checkpoints kept beside the best one")
    run.add_argument(
        "--max-bad-steps",
        type=int,
        default=10,
        help="steps that may be skipped, as loss or gradient is not finite, before the run stops",
    )
    run.add_argument(
        "--report-to",
        choices=("tensorboard", "wandb", "mlflow", "trackio", "none"),
        help="logger of the metrics beside metrics.jsonl; default: tensorboard where it is installed",
    )
    run.add_argument(
        "--dry-run", action=flag, default=False, help="stop after the import table and one validation pass"
    )
    run.add_argument(
        "--report-json", type=Path, metavar="FILE", help="import table and step-0 acceptance as JSON"
    )
    run.add_argument(
        "--export",
        choices=("specforge",),
        help="also write RUN/specforge/ in the midlayer layout, which SGLang and SpecForge load",
    )
    run.add_argument(
        "--load-test",
        action=flag,
        default=True,
        help="where vLLM is installed, let it load the finished drafter on the CPU; what it refuses fails "
        "the stage",
    )
    training_plan.add_arguments(parser)
    verifier.add_arguments(parser)
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> None:
    _check_flags(args)
    if args.plan:
        training_plan.show(args)
        return
    if args.shard and _is_trained(args):
        return
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # speculators picks its kernels by what is visible
    from common import processes, training
    from common.train_inputs import Inputs
    from common.train_output import Output
    from common.train_start import Start

    device, dtype = processes.start(args.device)
    if device.type == "cuda" and args.total_seq_len % 128:
        raise InputError(
            f"--total-seq-len {args.total_seq_len}: a GPU's flex attention needs multiples of 128"
        )
    if args.probe_layer_ids:
        _probe(args, device)
        return
    inputs = Inputs.settle(args)
    _settle_lr(args)
    output = Output(args, inputs)
    if args.dry_run:
        Start.prepare(args, inputs, device, dtype, known=None)
        return
    with atomic_io.locked(output.drafter) if processes.is_main() else nullcontext():
        if not processes.main_decides(output.begin):
            processes.main_decides(output.export)
            return
        try:
            start = Start.prepare(args, inputs, device, dtype, known=output.step0())
            processes.main_decides(lambda: output.clear_for(start))
            trainer = training.Trainer(
                start.model,
                training.Settings.of(args),
                output.checkpoints,
                start.train_loader,
                start.held_out,
                dtype=dtype,
            )
        except BaseException:
            if processes.is_main():
                output.abandon()
            raise
        outcome = trainer.run(start.step0)
        processes.main_decides(lambda: output.finish(start, outcome))


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse what no run can have, before a second is spent on it."""
    at_least_one = ("total_seq_len", "epochs", "max_steps", "ttt_steps", "save_every", "keep_last")
    at_least_one += ("gradient_accumulation_steps",)
    not_negative = ("num_workers", "loader_memory", "lr", "weight_decay", "max_bad_steps", "anchor")
    shares = ("eval_ratio", "warmup_ratio", "min_step0_acceptance")
    for names, low, high in ((at_least_one, 1, None), (not_negative, 0, None), (shares, 0, 1)):
        for name in names:
            value = getattr(args, name)
            if value is not None and (value < low or (high is not None and value >= high)):
                bound = f"at least {low}" if high is None else f"in [{low}, {high})"
                raise InputError(f"--{name.replace('_', '-')} {value}: must be {bound}")
    online = args.hidden_states == "online"
    if not online and (args.endpoint or args.shared_folder or args.layer_ids):
        raise InputError("--endpoint, --shared-folder and --layer-ids are for --hidden-states online")
    if online and args.shard:
        raise InputError("--hidden-states online stores nothing, so there is nothing to take shard by shard")
    if args.probe_layer_ids and not args.finetune_from:
        raise InputError("--probe-layer-ids needs --finetune-from: it measures an imported head")
    if args.anchor and not args.finetune_from:
        raise InputError("--anchor needs --finetune-from: from scratch there is nothing to hold on to")
    if args.shard and (args.max_time or args.max_steps):
        raise InputError(
            f"--max-{'time' if args.max_time else 'steps'} and --shard: the run could end before the last "
            "shard, which writes drafter/. Limit it by --epochs, which are passes over each shard"
        )
    if args.fsdp and not args.plan and "LOCAL_RANK" not in os.environ:
        raise InputError("--fsdp needs several processes: start 04_train.py by torchrun")
    if args.report_to not in (None, "none") and find_spec(args.report_to) is None:
        raise InputError(
            f"--report-to {args.report_to}: it is not installed. `pip install {args.report_to}`, or pass "
            "--report-to none; metrics.jsonl is written in any case"
        )
    if args.draft_vocab == "checkpoint" and not args.finetune_from:
        raise InputError(
            "--draft-vocab checkpoint needs --finetune-from: from scratch there is no checkpoint"
        )


def _is_trained(args: argparse.Namespace) -> bool:
    """Whether a shard is done with, so that a driver loop can be run again; the last one still exports."""
    if args.overwrite or not args.resume:
        args.shard.require_first("--overwrite" if args.overwrite else "--no-resume")
        return False
    trained: bool = args.shard.is_trained(args.run_dir)
    return trained and not args.shard.is_last


def _probe(args: argparse.Namespace, device: torch.device) -> None:
    """Measure the head on each candidate's states and recommend one."""
    from common import acceptance, dataset, step0
    from common.hidden_states import HiddenStateStore
    from common.loaders import single_rows

    folder = args.data_from or args.run_dir
    states = manifest.read(folder / "probe_states", "03_capture_hidden.py --probe 32 --layer-ids ...")
    captured = states.facts["layer_ids"]
    model = verifier.from_args(args, states.facts)
    store = HiddenStateStore.made_with(states.facts, folder / "probe_states", model.hidden_size)
    data = dataset.load(folder / "dataset")

    def measure(head: Eagle3DraftModel, columns: list[int]) -> Acceptance:
        batches = single_rows(store, data, columns)
        return acceptance.measure_offline(head.to(device), batches, model, args.ttt_steps)

    step0.probe_layer_ids(args, model, captured, args.probe_layer_ids, measure)


def _settle_lr(args: argparse.Namespace) -> None:
    default = _FINETUNE_LR if args.finetune_from else _SCRATCH_LR
    args.lr = manifest.settle("learning rate", flag=args.lr, inherited=None, default=default)
    if args.lr * args.anchor >= 1:
        raise InputError(
            f"--anchor {args.anchor} with --lr {args.lr}: each step would take back rate x W = "
            f"{args.lr * args.anchor:.2f} of the way to the start; W must be less than {1 / args.lr:g}"
        )


if __name__ == "__main__":
    sys.exit(main())
