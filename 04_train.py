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
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import atomic_io, cli, head_flags, log, manifest, verifier
from common.errors import InputError

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from torch.utils.data import DataLoader

    from common.acceptance import Acceptance
    from common.draft_vocab import DraftVocab, Ids
    from common.loaders import HeldOut, TrainingRows
    from common.training import Outcome, Settings
    from common.verifier import Verifier
    from common.warm_start import Plan

_LOG = log.get("04_train")
STAGE = "04_train"
_FINETUNE_LR, _SCRATCH_LR = 2e-5, 1e-4
_STEP0 = "step0.json"
# Two runs that differ in one of these are two runs; folders, devices and what is kept decide nothing.
_DECIDING = (
    *("finetune_from", "finetune_revision", "draft_vocab", "embedding", "init_missing", "train_lm_head"),
    *("num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("rope_theta", "rms_norm_eps", "max_position_embeddings", "head_layer_ids"),
    *("lr", "epochs", "max_steps", "ttt_steps", "total_seq_len", "optimizer", "weight_decay"),
    *("scheduler", "warmup_ratio", "eval_ratio", "seed"),
)


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
    recipe.add_argument("--ttt-steps", type=int, default=3, help="draft tokens in a chain")
    recipe.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="as in speculators")
    recipe.add_argument("--weight-decay", type=float, default=0.01, help="of adamw, as a share of the rate")
    recipe.add_argument(
        "--scheduler",
        choices=("cosine", "linear", "none"),
        default="cosine",
        help="learning rate after the warm-up, to 0 at the last step; none keeps it from the first step on",
    )
    recipe.add_argument("--warmup-ratio", type=float, default=0.05, help="share of the steps")
    recipe.add_argument(
        "--train-lm-head", action=flag, default=True, help="train the drafter's output rows as well"
    )
    recipe.add_argument("--seed", type=int, default=0, help="of new weights and of the order of the rows")
    run = parser.add_argument_group("Running")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    run.add_argument(
        "--resume", action=flag, default=True, help="go on from the newest checkpoint; --no-resume drops it"
    )
    run.add_argument(
        "--save-every", type=int, default=1000, help="steps between checkpoints; each epoch ends with one"
    )
    run.add_argument("--keep-last", type=int, default=2, help="newest checkpoints kept beside the best one")
    run.add_argument(
        "--max-bad-steps", type=int, default=10, help="steps skipped for their gradient before the run stops"
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
    verifier.add_arguments(parser)
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> None:
    _check_ranges(args)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # speculators picks its kernels by what is visible
    from common import training

    device, dtype = training.start(args.device)
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
    with atomic_io.locked(output.drafter) if training.is_main() else nullcontext():
        if not training.main_decides(output.begin):
            training.main_decides(output.export)
            return
        try:
            start = Start.prepare(args, inputs, device, dtype, known=output.step0())
            training.main_decides(lambda: output.clear_for(start))
            trainer = training.Trainer(
                start.model,
                _settings(args),
                output.checkpoints,
                start.train_loader,
                start.held_out,
                dtype=dtype,
            )
        except BaseException:
            if training.is_main():
                output.abandon()
            raise
        outcome = trainer.run(start.step0)
        training.main_decides(lambda: output.finish(start, outcome))


def _check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers that no run can have, before a second is spent on them."""
    at_least_one = ("total_seq_len", "epochs", "max_steps", "ttt_steps", "save_every", "keep_last")
    not_negative = ("num_workers", "lr", "weight_decay", "max_bad_steps")
    shares = ("eval_ratio", "warmup_ratio", "min_step0_acceptance")
    for names, low, high in ((at_least_one, 1, None), (not_negative, 0, None), (shares, 0, 1)):
        for name in names:
            value = getattr(args, name)
            if value is not None and (value < low or (high is not None and value >= high)):
                bound = f"at least {low}" if high is None else f"in [{low}, {high})"
                raise InputError(f"--{name.replace('_', '-')} {value}: must be {bound}")
    if args.probe_layer_ids and not args.finetune_from:
        raise InputError("--probe-layer-ids needs --finetune-from: it measures an imported head")
    if args.draft_vocab == "checkpoint" and not args.finetune_from:
        raise InputError(
            "--draft-vocab checkpoint needs --finetune-from: from scratch there is no checkpoint"
        )


# ----------------------------------------------------------------------------------------------------------
# What the stages before have left


@dataclass(frozen=True)
class Inputs:
    """The folders that a run reads, after they were found to belong together.

    Attributes:
        folder: the run folder with dataset/, hidden_states/ and vocab/.
        facts: what 03 recorded.
        failed: rows that 03 gave up.
        model: the verifier.
        vocab: 02's draft vocabulary; None where the drafter needs none of it.
        token_counts: [V] int64, from 02; None without.
        fingerprints: of all that was read.
        accepted_stale: inputs that had changed and were accepted.
    """

    folder: Path
    facts: dict[str, Any]
    failed: list[int]
    model: Verifier
    vocab: DraftVocab | None
    token_counts: Ids | None
    fingerprints: dict[str, str]
    accepted_stale: list[str]

    @classmethod
    def settle(cls, args: argparse.Namespace) -> Inputs:
        """Read the manifests and check that states, rows and vocabulary are of one making.

        Raises:
            InputError: something is missing, or was made from something else.
        """
        from common.draft_vocab import DraftVocab, read_array

        folder = args.data_from or args.run_dir
        upstream = {"dataset": folder / "dataset"}
        states, stale = manifest.require_made_from(
            folder / "hidden_states", upstream, made_by="03_capture_hidden.py", accept_stale=args.accept_stale
        )
        fingerprints = {name: manifest.fingerprint(folder / name) for name in ("dataset", "hidden_states")}
        vocab = counts = None
        if args.draft_vocab == "rebuild" or (folder / "vocab" / manifest.NAME).exists():
            _, old = manifest.require_made_from(
                folder / "vocab", upstream, made_by="02_build_vocab_map.py", accept_stale=args.accept_stale
            )
            vocab, counts = DraftVocab.load(folder / "vocab"), read_array(folder / "vocab/token_counts.npy")
            fingerprints["vocab"] = manifest.fingerprint(folder / "vocab")
            stale += old
        if args.finetune_from and Path(args.finetune_from).exists():
            fingerprints["finetune_from"] = manifest.fingerprint(Path(args.finetune_from))
        model = verifier.from_args(args, states.facts)
        model.require_tokenizer_of(states.facts, f"{folder / 'hidden_states'}/")
        failed = [int(row) for row in states.counts.get("failures", {})]
        return cls(folder, states.facts, failed, model, vocab, counts, fingerprints, stale)


# ----------------------------------------------------------------------------------------------------------
# Before the first step


@dataclass(frozen=True)
class Start:
    """A drafter, the rows, and what the one is worth on the others before the first step.

    Attributes:
        model: float32, on the device.
        plan: of the import; None from scratch.
        vocab: the draft vocabulary.
        rows: trained and held-out rows.
        train_loader: packed batches of the trained rows.
        held_out: measures on the held-out rows.
        step0: acceptance before the first step, by source.
    """

    model: Eagle3DraftModel
    plan: Plan | None
    vocab: DraftVocab
    rows: TrainingRows
    train_loader: DataLoader
    held_out: HeldOut
    step0: dict[str, Acceptance]

    @classmethod
    def prepare(
        cls,
        args: argparse.Namespace,
        inputs: Inputs,
        device: torch.device,
        dtype: torch.dtype,
        known: dict[str, Acceptance] | None,
    ) -> Start:
        """Build the drafter, show the import, open the rows, and measure.

        Args:
            args: the flags.
            inputs: what is read.
            device: to train on.
            dtype: of states.
            known: what was measured before the first step of the run that is resumed; None measures.

        Raises:
            InputError: head, rows or vocabulary cannot be used.
            StageError: the imported head fails the step-0 gate.
        """
        import torch

        from common.hidden_states import HiddenStateStore
        from common.loaders import HeldOut, TrainingRows
        from common.training import is_main

        torch.manual_seed(args.seed)
        model, plan, vocab = _build(args, inputs)
        rows = TrainingRows.open(
            inputs.folder / "dataset",
            HiddenStateStore(inputs.folder / "hidden_states", inputs.model.hidden_size),
            failed=inputs.failed,
            total_seq_len=args.total_seq_len,
            eval_ratio=args.eval_ratio,
        )
        workers = args.num_workers
        train_loader, held_out_loader = rows.loaders(
            total_seq_len=args.total_seq_len,
            dtype=dtype,
            num_workers=(0 if device.type == "cpu" else 4) if workers is None else workers,
            seed=args.seed,
        )
        held_out = HeldOut(rows, held_out_loader, inputs.model, args.ttt_steps)
        step0 = known or _measure(args, inputs, model.to(device), plan, held_out)
        start = cls(model, plan, vocab, rows, train_loader, held_out, step0)
        start.describe(_settings(args), args.total_seq_len)
        if args.report_json and is_main():
            atomic_io.write_json(args.report_json, start.report)
        return start

    @property
    def report(self) -> dict[str, Any]:
        """For `--report-json`: `{layout, tensors, draft_vocab, step0}`."""
        from common import acceptance

        table = self.plan.report() if self.plan else _scratch_report(self.model, self.vocab)
        parts = {source: part.as_json() for source, part in self.step0.items()}
        whole = acceptance.total(self.step0.values()).as_json()
        return {**table, "step0": {**whole, "by_source": parts}}

    def describe(self, settings: Settings, total_seq_len: int) -> None:
        """Show what the run will be, each number with its formula."""
        from common import training

        rows, steps = self.rows, training.count_steps(self.train_loader, settings)
        _LOG.info(
            "rows: %d = %d trained + %d held out + %d left out",
            *(len(rows.sources), len(rows.trained), len(rows.held_out), len(rows.left_out)),
        )
        _LOG.info(
            "steps: %d = min(%d epochs x packed batches of %d tokens a device, --max-steps %s)",
            *(steps, settings.epochs, total_seq_len, settings.max_steps or "none"),
        )
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        _LOG.info(
            "trained: %s parameters x 16 bytes (float32 weight, gradient, two moments) = %s a device",
            *(log.human_count(trained), log.human_bytes(16 * trained)),
        )
        coverage = self.held_out.coverage(self.model)
        if coverage is not None:
            _LOG.info("position 0 can reach %.3f: what the draft vocabulary has of the verifier's", coverage)


def _probe(args: argparse.Namespace, device: torch.device) -> None:
    """Measure the head on each candidate's states and recommend one."""
    from common import acceptance, dataset, step0
    from common.hidden_states import HiddenStateStore
    from common.loaders import single_rows

    folder = args.data_from or args.run_dir
    states = manifest.read(folder / "probe_states", "03_capture_hidden.py --probe 32 --layer-ids ...")
    captured = states.facts["layer_ids"]
    model = verifier.from_args(args, states.facts)
    store = HiddenStateStore(folder / "probe_states", model.hidden_size, len(captured))
    data = dataset.load(folder / "dataset")

    def measure(head: Eagle3DraftModel, columns: list[int]) -> Acceptance:
        batches = single_rows(store, data, columns)
        return acceptance.measure_offline(head.to(device), batches, model, args.ttt_steps)

    step0.probe_layer_ids(args, model, captured, args.probe_layer_ids, measure)


def _build(args: argparse.Namespace, inputs: Inputs) -> tuple[Eagle3DraftModel, Plan | None, DraftVocab]:
    """The imported head, or a new one; its plan, and its draft vocabulary."""
    from common import drafter, warm_start
    from common.draft_vocab import DraftVocab

    ids = inputs.facts["layer_ids"]
    if args.finetune_from:
        plan = warm_start.open_plan(
            args, inputs.model, layer_ids=ids, rebuilt=inputs.vocab, speculative_tokens=args.ttt_steps
        )
        plan.show(inputs.token_counts)
        return warm_start.load(plan, inputs.model, train_lm_head=args.train_lm_head), plan, plan.vocab
    vocab = DraftVocab.full(inputs.model.vocab_size) if args.draft_vocab == "full" else inputs.vocab
    assert vocab is not None  # `Inputs.settle` reads 02's for `rebuild`
    config = drafter.new_config(
        drafter.transformer_of(inputs.model, args),
        inputs.model,
        layer_ids=ids,
        draft_vocab_size=len(vocab),
        speculative_tokens=args.ttt_steps,
    )
    return drafter.build(config, vocab, inputs.model, train_lm_head=args.train_lm_head), None, vocab


def _scratch_report(model: Eagle3DraftModel, vocab: DraftVocab) -> dict[str, Any]:
    """The import table of a drafter that is imported from nowhere."""
    tensors = []
    for name in model.state_dict():
        if name in ("d2t", "t2d"):
            source, status, reason = "vocabulary", "new", "02's"
        elif name.startswith(("embed_tokens", "lm_head", "verifier_")):
            source, status, reason = "verifier", "filled from verifier", "from scratch"
        else:
            source, status, reason = "random", "new", "from scratch"
        if not name.startswith("verifier_"):
            tensors.append({"name": name, "source": source, "status": status, "reason": reason})
    counts = {"kept": 0, "new": len(vocab), "dropped": 0}
    return {"layout": None, "tensors": tensors, "draft_vocab": counts}


def _measure(
    args: argparse.Namespace,
    inputs: Inputs,
    model: Eagle3DraftModel,
    plan: Plan | None,
    held_out: HeldOut,
) -> dict[str, Acceptance]:
    """One pass over the held-out rows; an imported head has to pass the gate."""
    from common import acceptance, step0

    passes: list[dict[str, Acceptance]] = []

    def measure(candidate: Eagle3DraftModel) -> Acceptance:
        passes.append(held_out.by_source(candidate.to(model.device)))
        return acceptance.total(passes[-1].values())

    if plan is not None:
        step0.require_step0(
            model, plan, inputs.model, measure, args.min_step0_acceptance, inputs.token_counts
        )
    else:
        found = measure(model)
        _LOG.info("step 0: acceptance length %.3f, position 0 %.3f", found.length, found.by_position[0])
    return passes[0]


def _settings(args: argparse.Namespace) -> Settings:
    from dataclasses import fields

    from common.training import Settings

    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})


# ----------------------------------------------------------------------------------------------------------
# What a run writes


class Output:
    """`checkpoints/`, `drafter/` and, on demand, `specforge/`.

    What an earlier run left is discarded only when the new start has been measured: a misspelt flag costs
    nothing.

    Attributes:
        drafter: its manifest says that the run is finished.
        checkpoints: of the run, its step-0 acceptance and its metrics.
    """

    def __init__(self, args: argparse.Namespace, inputs: Inputs) -> None:
        self.drafter, self.checkpoints = args.run_dir / "drafter", args.run_dir / "checkpoints"
        self._specforge = args.run_dir / "specforge"
        self._args, self._verifier = args, inputs.model
        finished = (self.drafter / manifest.NAME).exists()
        self._fresh = args.overwrite or not (args.resume or finished)
        self._record = manifest.Manifest(
            stage=STAGE,
            config={name: getattr(args, name) for name in _DECIDING} | {"verifier": inputs.model.name},
            inputs=inputs.fingerprints,
            facts={**inputs.facts, **inputs.model.facts()},
            accepted_stale=inputs.accepted_stale,
        )

    def begin(self) -> bool:
        """Whether there is work to do; a run that was begun with other settings is refused."""
        if self._fresh:
            return True
        working = self._begin(overwrite=False)
        try:
            self.step0()
        except InputError:
            manifest.abandon(self.drafter)
            raise
        return working

    def step0(self) -> dict[str, Acceptance] | None:
        """What the run that is resumed had measured before its first step.

        Raises:
            InputError: the checkpoints are of a run with other settings.
        """
        from common.acceptance import Acceptance

        path = self.checkpoints / _STEP0
        if self._fresh or not path.exists():
            return None
        begun = atomic_io.read_json(path)
        if begun["config"] != self._record.config:
            raise InputError(
                f"{self.checkpoints} holds a run with other settings, though {self.drafter} knows of none. "
                "Pass --no-resume to start again, or another --run-dir to keep it."
            )
        return {source: Acceptance.from_json(row) for source, row in begun["step0"].items()}

    def clear_for(self, start: Start) -> None:
        """Discard what an earlier run left, unless it is resumed, and keep the new one's step 0."""
        if self._fresh:
            for folder in (self.checkpoints, self._specforge):
                shutil.rmtree(folder, ignore_errors=True)
            self._begin(overwrite=True)
        parts = {source: part.as_json() for source, part in start.step0.items()}
        atomic_io.write_json(self.checkpoints / _STEP0, {"config": self._record.config, "step0": parts})

    def abandon(self) -> None:
        """After a failure before the first step: other settings may follow, unless a run can be resumed."""
        from common.train_checkpoints import newest_step

        if not self._fresh and newest_step(self.checkpoints) is None:
            manifest.abandon(self.drafter)

    def finish(self, start: Start, outcome: Outcome) -> None:
        """Write the best drafter, in bfloat16, and what it is worth beside its start."""
        from common import drafter

        _show(start.step0, outcome)
        drafter.save(start.model, self.drafter)
        record = self._record
        record.facts |= {
            "d2t": start.vocab.fingerprint,
            "step0": {source: part.as_json() for source, part in start.step0.items()},
            "best": {source: part.as_json() for source, part in outcome.best.items()},
        }
        record.counts = start.rows.counts() | {
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "bad_steps": outcome.bad_steps,
        }
        record.write(self.drafter)
        _LOG.info("%s: done", self.drafter)
        self.export()

    def export(self) -> None:
        """Write the finished drafter in the other layout, if that is asked for and not there yet."""
        from common import drafter

        if self._args.export is None or (self._specforge / manifest.NAME).exists():
            return
        drafter.export_specforge(self.drafter, self._specforge, self._verifier)
        # By this copy a run that starts from the folder notices when it is made again.
        shutil.copyfile(self.drafter / manifest.NAME, self._specforge / manifest.NAME)
        _LOG.info("%s: the same drafter in the midlayer layout", self._specforge)

    def _begin(self, *, overwrite: bool) -> bool:
        return manifest.begin(
            self.drafter, self._record, overwrite=overwrite, accept_stale=self._args.accept_stale
        )


def _show(step0: dict[str, Acceptance], outcome: Outcome) -> None:
    from common import acceptance

    _LOG.info("held-out acceptance length, offline:")
    for source in [*outcome.best, None] if len(outcome.best) > 1 else [None]:
        before, after = (
            acceptance.total(parts.values()) if source is None else parts[source]
            for parts in (step0, outcome.best)
        )
        _LOG.info(
            "  %-20s start %.3f -> step %d %.3f (%d drafts)",
            *(source or "all", before.length, outcome.best_step, after.length, after.drafts),
        )
    if acceptance.total(outcome.best.values()).length <= acceptance.total(step0.values()).length:
        _LOG.warning("no checkpoint is better than the start: train longer, or with another --lr")


def _settle_lr(args: argparse.Namespace) -> None:
    default = _FINETUNE_LR if args.finetune_from else _SCRATCH_LR
    args.lr = manifest.settle("learning rate", flag=args.lr, inherited=None, default=default)


if __name__ == "__main__":
    sys.exit(main())
