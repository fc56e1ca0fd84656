"""A drafter, its rows, and what the one is worth on the others before the first step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch.utils.data import DataLoader

from common import acceptance, atomic_io, drafter, log, processes, training, warm_start
from common.acceptance import Acceptance
from common.draft_vocab import DraftVocab
from common.hidden_states import HiddenStateStore
from common.loader_memory import WORKERS, Reading
from common.loaders import HeldOut, TrainingRows
from common.processes import is_main, main_decides
from common.step0 import require_step0
from common.train_inputs import Inputs
from common.training import Settings
from common.warm_start import Plan

_LOG = log.get("train_start")


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
        torch.manual_seed(args.seed)
        model, plan, vocab = _build(args, inputs)
        rows = _open_rows(args, inputs)
        train_loader, held_out_loader = _open_loaders(args, rows, device, dtype)
        held_out = HeldOut(rows, held_out_loader, inputs.model, args.ttt_steps)
        model.to(device)  # type: ignore[arg-type]

        def report(step0: dict[str, Acceptance]) -> None:
            if args.report_json and is_main():
                atomic_io.write_json(args.report_json, _report(model, plan, vocab, step0))

        if known:
            report(known)
        step0 = known or _measure(args, inputs, model, plan, held_out, report)
        start = cls(model, plan, vocab, rows, train_loader, held_out, step0)
        start.describe(Settings.of(args), args.total_seq_len)
        return start

    def describe(self, settings: Settings, total_seq_len: int) -> None:
        """Show what the run will be, each number with its formula."""
        rows, steps = self.rows, training.count_steps(self.train_loader, settings)
        _LOG.info(
            "rows: %d = %d trained + %d held out + %d left out",
            *(len(rows.sources), len(rows.trained), len(rows.held_out), len(rows.left_out)),
        )
        _LOG.info(
            "steps: %d = min(%d epochs x packed batches of %d tokens a device / %d a step, --max-steps %s)%s",
            *(steps, settings.epochs, total_seq_len, settings.gradient_accumulation_steps),
            settings.max_steps or "none",
            f", ended after {log.human_seconds(settings.max_time)}" if settings.max_time else "",
        )
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        parts = "float32 weight, gradient, two moments" + (", bfloat16 anchor" if settings.anchor else "")
        each, devices = 16 + 2 * bool(settings.anchor), processes.count() if settings.fsdp else 1
        _LOG.info(
            "trained: %s parameters x %d bytes (%s)%s = %s a device",
            *(log.human_count(trained), each, parts, f" / {devices} devices (--fsdp)" if devices > 1 else ""),
            log.human_bytes(each * trained / devices),
        )
        coverage = self.held_out.coverage(self.model)
        if coverage is not None:
            _LOG.info(
                "the draft vocabulary covers %.2f %% of the verifier's choices in the held-out rows: "
                "acceptance at position 0 can be no higher",
                100 * coverage,
            )


def _open_rows(args: argparse.Namespace, inputs: Inputs) -> TrainingRows:
    """The rows that take part; where a server is asked for their states, it has proven itself."""
    store = HiddenStateStore.made_with(
        inputs.facts, inputs.folder / "hidden_states", inputs.model.hidden_size
    )
    rows = TrainingRows.open(
        inputs.rows,
        store,
        failed=inputs.failed,
        total_seq_len=args.total_seq_len,
        eval_ratio=args.eval_ratio,
        shard=args.shard,
        online=inputs.online,
    )
    if inputs.online:
        main_decides(partial(inputs.online.prove, inputs.model))
    return rows


def _open_loaders(
    args: argparse.Namespace, rows: TrainingRows, device: torch.device, dtype: torch.dtype
) -> tuple[DataLoader, DataLoader]:
    """Loaders of the trained and of the held-out rows, with as many readers as their memory allows."""
    reading = Reading.fit(
        tokens=args.total_seq_len,
        token_bytes=rows.token_bytes(dtype),
        workers=args.num_workers,
        default=0 if device.type == "cpu" else WORKERS,
        limit=args.loader_memory and 1e9 * args.loader_memory,
    )
    reading.describe()
    return rows.loaders(
        total_seq_len=args.total_seq_len,
        dtype=dtype,
        num_workers=reading.workers,
        prefetch=reading.prefetch,
        seed=args.seed,
        epochs=args.epochs,
    )


def _build(args: argparse.Namespace, inputs: Inputs) -> tuple[Eagle3DraftModel, Plan | None, DraftVocab]:
    """The imported head, or a new one; its plan, and its draft vocabulary."""
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


def _report(
    model: Eagle3DraftModel, plan: Plan | None, vocab: DraftVocab, step0: dict[str, Acceptance]
) -> dict[str, Any]:
    """For `--report-json`: `{layout, tensors, draft_vocab, step0}`."""
    table = plan.report() if plan else _scratch_report(model, vocab)
    parts = {source: part.as_json() for source, part in step0.items()}
    return {**table, "step0": {**acceptance.total(step0.values()).as_json(), "by_source": parts}}


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
    report: Callable[[dict[str, Acceptance]], None],
) -> dict[str, Acceptance]:
    """One pass over the held-out rows; an imported head has to pass the gate after the report."""
    passes: list[dict[str, Acceptance]] = []

    def measure(candidate: Eagle3DraftModel) -> Acceptance:
        passes.append(held_out.by_source(candidate.to(model.device)))  # type: ignore[arg-type]
        if len(passes) == 1:
            report(passes[0])
        return acceptance.total(passes[-1].values())

    if plan is not None:
        require_step0(model, plan, inputs.model, measure, args.min_step0_acceptance, inputs.token_counts)
    else:
        found = measure(model)
        _LOG.info("step 0: acceptance length %.3f, position 0 %.3f", found.length, found.by_position[0])
    return passes[0]
