"""speculators' Trainer on CUDA and on a CPU, with what runs of days need: exact resume, guards, hard stop."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train import distributed
from speculators.train import trainer as speculators_trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import get_constant_schedule_with_warmup

from common import acceptance, drafter, log, train_metrics
from common.acceptance import Acceptance
from common.anchor import Anchor
from common.errors import InputError, StageError
from common.loaders import HeldOut, Rows, require_whole
from common.processes import is_main, main_decides
from common.shards import Shard
from common.train_checkpoints import StepCheckpointer
from common.train_guards import LossWatch, Pace

_LOG = log.get("training")
_CLIP = 1.0


@dataclass(frozen=True)
class Settings:
    """What decides a run: equal settings and inputs give equal weights.

    Attributes:
        lr: highest learning rate.
        epochs: passes over the trained rows.
        max_steps: hard stop, None for none.
        ttt_steps: K, draft tokens in a chain.
        optimizer: muon takes the matrices and leaves head and norms to adamw.
        weight_decay: of adamw.
        scheduler: of the learning rate after the warm-up: down to zero at the last step, or constant.
        warmup_ratio: share of the steps.
        save_every: steps from checkpoint to checkpoint, beside one at each epoch's end.
        keep_last: checkpoints kept, beside the best.
        max_bad_steps: steps without finite loss and gradient that are skipped before the run stops.
        shard: of the rows, which are trained shard by shard; None trains all of them together.
        gradient_accumulation_steps: packed batches of a step on each process; their gradients are averaged.
        max_time: seconds after which no further step begins, None for no limit.
        anchor: W of the pull towards the imported weights, 0 for none.
        fsdp: whether weights, gradients and moments are shared out among the processes.
        report_to: logger of the metrics beside metrics.jsonl; None is TensorBoard where it is installed.
    """

    lr: float
    epochs: int
    max_steps: int | None
    ttt_steps: int
    optimizer: Literal["adamw", "muon"]
    weight_decay: float
    scheduler: Literal["cosine", "linear", "constant"]
    warmup_ratio: float
    save_every: int
    keep_last: int
    max_bad_steps: int
    shard: Shard | None = None
    gradient_accumulation_steps: int = 1
    max_time: float | None = None
    anchor: float = 0.0
    fsdp: bool = False
    report_to: str | None = None

    @property
    def all_epochs(self) -> int:
        """Passes over the rows of one shard after the other."""
        return self.epochs * (self.shard.count if self.shard else 1)

    @property
    def last_epoch(self) -> int:
        """Behind the passes of this shard."""
        return self.epochs * (self.shard.number if self.shard else 1)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """The settings among the flags of 04."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Outcome:
    """What a finished run has to tell.

    Attributes:
        steps: steps that were made.
        best_step: the checkpoint with the greatest held-out acceptance length.
        best: its acceptance, by source.
        best_weights: its float32 model.safetensors.
        bad_steps: steps that were skipped.
    """

    steps: int
    best_step: int
    best: dict[str, Acceptance]
    best_weights: Path
    bad_steps: int


# ----------------------------------------------------------------------------------------------------------
# The plan of a run


def count_steps(loader: DataLoader, settings: Settings) -> int:
    """`min(epochs x packed batches / batches of a step, max_steps)`, at most: `max_time` may end it earlier.

    Each epoch packs its own order, so its batches are counted. Its last step takes what is left.

    Args:
        loader: of the trained rows.
        settings: epochs, batches of a step and max_steps.
    """
    sampler: Any = loader.batch_sampler
    steps = 0
    for epoch in range(settings.all_epochs):
        steps += math.ceil(len(sampler._generate_batches(epoch)) / settings.gradient_accumulation_steps)
        if settings.max_steps is not None and steps >= settings.max_steps:
            return settings.max_steps
    return steps


def trainer_config(settings: Settings, folder: Path, steps: int, dtype: torch.dtype) -> Any:
    """speculators' own configuration of the run, the schedule ending at the last step."""
    train_kwargs, val_kwargs = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        # The fused losses are Triton kernels.
        loss_implementation="fused" if torch.cuda.is_available() else "eager",
        ttt_steps=settings.ttt_steps,
        ttt_step_loss_decay=1.0,
    )
    return speculators_trainer.TrainerConfig(
        lr=settings.lr,
        num_epochs=settings.all_epochs,
        save_path=str(folder),
        resume_from_checkpoint=True,
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        # `match_rms_adamw` scales muon's updates to adamw's size, so one rate serves both.
        muon_lr=settings.lr,
        # speculators knows no constant rate after a warm-up: `setup_optimizer` makes it.
        scheduler_type="none" if settings.scheduler == "constant" else settings.scheduler,
        scheduler_warmup_ratio=settings.warmup_ratio,
        scheduler_total_steps=steps,
        hidden_states_dtype=dtype,
        max_steps=steps,
    )


# ----------------------------------------------------------------------------------------------------------
# The run


class Trainer(speculators_trainer.Trainer):
    """speculators' Trainer: its set-up of model, processes, optimizers and schedules under our own loop.

    Its loop rounds checkpoints, stops late and loses the step on a signal, and has no guard; see
    `train_checkpoints` for the files. Training itself draws no random numbers, so weights, optimizer,
    schedule and the place in the data are all that a resumed run needs to be the same run.
    """

    checkpointer: StepCheckpointer

    def __init__(
        self,
        model: Eagle3DraftModel,
        settings: Settings,
        folder: Path,
        train_loader: DataLoader,
        held_out: HeldOut,
        *,
        dtype: torch.dtype,
    ) -> None:
        """Set everything up, from the newest checkpoint where there is one.

        Args:
            model: float32; lm_head is trained if it requires a gradient.
            settings: the run.
            folder: `checkpoints/`; the newest one is resumed.
            train_loader: of the trained rows.
            held_out: measures at each checkpoint.
            dtype: of states and mixed precision.
        """
        drafter.require_float32(model)
        self.settings, self.held_out = settings, held_out
        self.device = torch.device(distributed.get_local_rank())
        self.total_steps = count_steps(train_loader, settings)
        self.bad_steps, self.seconds = 0, 0.0
        self.watch, self.pace = LossWatch(), Pace()
        config = trainer_config(settings, folder, self.total_steps, dtype)
        super().__init__(model, config, train_loader)
        self.device_type = self.device.type

    def setup_trainer(self) -> None:
        """Where to begin: at the newest checkpoint, or at step 0."""
        self.checkpointer = StepCheckpointer(self.config.save_path)
        found = self.checkpointer.previous_epoch >= 0
        state = self.checkpointer.state() if found else self._state(0, 0)
        if state["processes"] != distributed.get_world_size():
            raise InputError(
                f"{self.checkpointer.path} was written by {state['processes']} processes, these are "
                f"{distributed.get_world_size()}: each would take up other rows than it left. Start as many "
                "as before, or pass --no-resume to start again."
            )
        self.current_epoch, self._resume_local_step = state["epoch"], state["local_step"]
        self.global_step = self.checkpointer.previous_epoch if found else 0
        self.bad_steps, self.seconds = state["bad_steps"], state["seconds"]
        # A kill may have come between a checkpoint and its measure. One that a signal asked for is never
        # measured: the undisturbed run has none at that step, and its best must not be another's.
        self._unmeasured = found and not state["interrupted"]
        if found:
            _LOG.info("resumed at step %d of %d", self.global_step, self.total_steps)

    def setup_model(self) -> None:
        """Put the model on its device, remember the anchor, and take up the newest checkpoint's weights."""
        self.model.to(self.device)  # type: ignore[arg-type]
        if self.settings.fsdp:
            self._setup_model_fsdp(load_checkpoint=False)
        # Before a checkpoint is loaded: the anchor is the import, also of a run that is resumed.
        self._anchor = Anchor(self.model.parameters(), self.settings.anchor) if self.settings.anchor else None
        if not self.settings.fsdp:
            super().setup_model()
        elif self.checkpointer.previous_epoch >= 0:
            self.checkpointer.load_model_state_dict(self.model)

    def setup_optimizer(self) -> None:
        """speculators' optimizers and schedules, and a constant rate after the warm-up."""
        super().setup_optimizer()
        if self.settings.scheduler != "constant":
            return
        warmup, _ = speculators_trainer._resolve_scheduler_steps(self.config, len(self.train_loader))
        at = self.checkpointer.previous_epoch
        self.schedulers = [get_constant_schedule_with_warmup(one, warmup, at) for one in self.optimizers]
        if at >= 0:
            self.checkpointer.load_scheduler_state_dict(self.schedulers)

    @property
    def drafter(self) -> Eagle3DraftModel:
        """The model without its wrapper for several processes."""
        wrapped: Any = self.model
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def run(self, start: dict[str, Acceptance]) -> Outcome:
        """Train to the last step, measuring the held-out rows at each checkpoint; the best weights are kept.

        Args:
            start: what the held-out rows gave before the first step, by source, for the log.

        Returns:
            The outcome; the model holds the last step's weights, which need not be the best.

        Raises:
            KeyboardInterrupt: SIGTERM or SIGINT came; the step was finished and saved.
            StageError: too many steps had no finite loss or gradient.
        """
        folder = Path(self.config.save_path)
        recording = train_metrics.recording(folder, self.global_step, self.settings.report_to)
        self._began, self._seconds_before = time.monotonic(), self.seconds
        with _stop_signals() as stopping, recording:
            if not self.global_step:
                train_metrics.held_out(0, start)
            if self._unmeasured:
                self._measure(self.global_step)
            with log.bar(
                self.total_steps, unit="steps", description="train", initial=self.global_step
            ) as bar:
                self._bar, self._stopping = bar, stopping
                for epoch in range(self.current_epoch, self.settings.last_epoch):
                    if not self._finished:
                        self.train_epoch(epoch)
            self.pace.tell(ended=True)
        return self._outcome()

    @property
    def _finished(self) -> bool:
        limit = self.settings.max_time
        return self.global_step >= self.total_steps or (limit is not None and self.seconds >= limit)

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        """Train from the place that was resumed to the epoch's end or to the last step, with checkpoints."""
        self.model.train()
        sampler: Any = self.train_loader.batch_sampler
        sampler.set_epoch(epoch)
        packed = sampler._generate_batches(epoch)
        place = first = self._prepare_resume_skip(epoch)
        step: _Step | None = None
        began = time.perf_counter()
        for batch in self.train_loader:
            fetched = time.perf_counter()
            step = step or _Step(min(self.settings.gradient_accumulation_steps, len(packed) - place))
            if place > first:
                step.waited += fetched - began
            self._gather(step, batch, packed[place])
            place += 1
            if step.is_whole:
                self._update(step)
            began = time.perf_counter()
            step.worked += began - fetched
            if not step.is_whole:
                continue
            self._record(step, epoch)
            self._keep((epoch + 1, 0) if place == len(packed) else (epoch, place))
            if self._finished:
                return
            step = None
            began = time.perf_counter()

    def _gather(self, step: _Step, batch: dict[str, Any], rows: Rows) -> None:
        """Forward and backward of one packed batch; its gradient counts as one of the step's batches."""
        require_whole(batch, self.held_out.rows, rows.tolist())
        if not step.rows:
            self._optimizers_zero_grad()
        step.rows.append(rows.tolist())
        step.tokens += int((batch["document_ids"] != -1).sum())
        inputs = {
            name: value.to(self.device, non_blocking=True)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        dtype = self.config.hidden_states_dtype
        with self._exchanging(step.is_whole):
            with torch.autocast(self.device_type, dtype, enabled=dtype != torch.float32):
                _, loss, metrics = self.model(**inputs, **(self.config.train_call_kwargs or {}))
            (loss / step.batches).backward()
        step.losses.append(loss.detach())
        for name, value in metrics.items():
            step.metrics[name] = step.metrics.get(name, 0) + value.detach()

    @contextlib.contextmanager
    def _exchanging(self, wanted: bool) -> Iterator[None]:
        """Average gradients over the processes only in the last batch of a step."""
        wrapped: Any = self.model
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(wanted)
        elif self.is_distributed and not wanted:
            with wrapped.no_sync():
                yield
            return
        yield

    def _update(self, step: _Step) -> None:
        """Clip, and step where losses and gradient are finite."""
        found: torch.Tensor = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        step.norm = (found.full_tensor() if isinstance(found, DTensor) else found).item()
        step.rate = self.optimizers[-1].param_groups[0]["lr"]
        losses = torch.stack(step.losses).tolist()
        # Losses are this process's own, and all must skip the same step; the norm is the same for all.
        if not self._agree(not all(map(math.isfinite, (step.norm, *losses)))):
            if self._anchor:
                self._anchor.pull(step.rate)
            self._optimizers_step()
        else:
            self._skip(step, losses)
        self._tell_explosions(step, losses)
        self._tell_time()
        self._schedulers_step()
        self.global_step += 1

    def _schedulers_step(self) -> None:
        """Move the schedule on; with a time limit to the greater share, of the steps or of the time."""
        if self.settings.max_time is not None:
            share = max((self.global_step + 1) / self.total_steps, self.seconds / self.settings.max_time)
            for scheduler in self.schedulers:
                scheduler.last_epoch = min(share, 1.0) * self.total_steps - 1
        super()._schedulers_step()

    def _skip(self, step: _Step, losses: list[float]) -> None:
        self.bad_steps += 1
        rows = self.held_out.rows.named([row for batch in step.rows for row in batch])
        _LOG.warning(
            "step %d: loss %s, gradient norm %s, step skipped: %s",
            *(self.global_step, ", ".join(f"{loss:.3f}" for loss in losses), step.norm, rows),
        )
        if self.bad_steps > self.settings.max_bad_steps:
            raise StageError(
                f"step {self.global_step}: {self.bad_steps} steps had no finite loss or gradient, more than "
                f"--max-bad-steps {self.settings.max_bad_steps}; the last on {rows}. Lower --lr or "
                "raise --warmup-ratio, check these rows with `03_capture_hidden.py --verify`, and start "
                "again with --overwrite."
            )

    def _tell_explosions(self, step: _Step, losses: list[float]) -> None:
        for loss, rows in zip(losses, step.rows, strict=True):
            median = self.watch.exploded(loss)
            if median is not None:
                _LOG.warning(
                    "step %d: loss %.3f is %.1f times the running median %.3f: %s",
                    *(self.global_step, loss, loss / median, median, self.held_out.rows.named(rows)),
                )

    def _record(self, step: _Step, epoch: int) -> None:
        """One line of metrics."""
        metrics, processes = step.metrics, distributed.get_world_size()
        if self.is_distributed:
            metrics = speculators_trainer._all_reduce_metrics(metrics)
        # Read at once: each item() of its own would wait for the GPU again.
        counted = torch.stack([value.double() for value in metrics.values()]).tolist()
        values = speculators_trainer.normalize_counted_metrics(dict(zip(metrics, counted, strict=True)))
        self.pace.waited += step.waited
        self.pace.worked += step.worked
        row = {
            "epoch": epoch,
            "loss": values["loss"],
            **{f"loss_{k}": values[f"loss_{k}"] for k in range(self.settings.ttt_steps)},
            "lr": step.rate,
            "grad_norm": step.norm,
            "bad_steps": self.bad_steps,
            "tokens_per_s": step.tokens * processes / (step.waited + step.worked),
            "wait_share": step.waited / (step.waited + step.worked),
        }
        train_metrics.trained(self.global_step, row)
        self._bar.set_postfix(loss=f"{row['loss']:.3f}", tokens_per_s=f"{row['tokens_per_s']:.0f}")
        self._bar.update()

    def _keep(self, place: tuple[int, int]) -> None:
        """Save where it is time to, measure what was saved, and stop here if that is wished.

        Args:
            place: epoch and batch from which a resumed run goes on.
        """
        if self._finished or place[1] == 0 or self.global_step % self.settings.save_every == 0:
            self._save(*place)
            self._measure(self.global_step)
            self._tell_time()
            self.pace.tell(ended=False)
        if self._agree(self._stopping()):
            self._save(*place, interrupted=True)
            raise KeyboardInterrupt

    def _tell_time(self) -> None:
        """How long the run has taken, the same on all processes where the schedule hangs on it."""
        self.seconds = self._seconds_before + time.monotonic() - self._began
        if self.is_distributed and self.settings.max_time is not None:
            longest = torch.tensor(self.seconds, dtype=torch.float64, device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            self.seconds = longest.item()

    def _agree(self, mine: bool) -> bool:
        """Whether any process was told to stop: all must save the same step."""
        if not self.is_distributed:
            return mine
        flag = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(flag)
        return bool(flag.item())

    def _state(self, epoch: int, local_step: int, *, interrupted: bool = False) -> dict[str, Any]:
        """What a resumed run needs beside weights, moments and schedule."""
        return {
            "epoch": epoch,
            "local_step": local_step,
            "bad_steps": self.bad_steps,
            "seconds": self.seconds,
            "interrupted": interrupted,
            "processes": distributed.get_world_size(),
        }

    def _save(self, epoch: int, local_step: int, *, interrupted: bool = False) -> None:
        state = self._state(epoch, local_step, interrupted=interrupted)
        self.checkpointer.save_step(self.global_step, self.model, self.optimizers, self.schedulers, state)

    def _measure(self, step: int) -> None:
        """Measure a checkpoint unless that was done, and let the best one be known."""
        if main_decides(lambda: self.checkpointer.val_metrics(step)) is not None:
            return
        with self._gathered():
            found = self.held_out.by_source(self.drafter)
        whole = acceptance.total(found.values())
        _LOG.info(
            "step %d of %d: held-out acceptance length %.3f (accepted at position %s)",
            *(step, self.total_steps, whole.length),
            ", ".join(f"{place}: {share:.3f}" for place, share in enumerate(whole.by_position)),
        )
        row = {**whole.as_json(), "by_source": {name: part.as_json() for name, part in found.items()}}
        train_metrics.held_out(step, found)
        if is_main():
            best = self.checkpointer.read_best_epoch()
            before = self.checkpointer.val_metrics(best) if best is not None else None
            self.checkpointer.save_val_metrics(step, row)
            if before is None or row["acceptance_length"] > before["acceptance_length"]:
                self.checkpointer.update_best_symlink(step)
            self.checkpointer.prune(self.settings.keep_last)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """With FSDP: whole weights outside of the layers, some of which the measure uses by themselves."""
        wrapped: Any = self.model
        if isinstance(wrapped, FSDPModule):
            wrapped.unshard()
            yield
            wrapped.reshard()
        else:
            yield

    def _outcome(self) -> Outcome:
        """Which checkpoint is the best, and what it is worth."""
        if dist.is_initialized():
            dist.barrier()
        best = self.checkpointer.read_best_epoch()
        assert best is not None
        row = self.checkpointer.val_metrics(best)
        assert row is not None
        parts = {name: Acceptance.from_json(part) for name, part in row["by_source"].items()}
        weights = self.checkpointer.model_path(best)
        return Outcome(self.global_step, best, parts, weights, self.bad_steps)


@dataclass
class _Step:
    """What the packed batches of one step leave, on this process, until the weights move.

    Attributes:
        batches: how many they are.
        rows: of each batch so far.
        losses: of each batch so far.
        metrics: speculators' sums and totals.
        tokens: in these batches, padding not counted.
        waited: seconds for the batches.
        worked: seconds of computation.
        norm: of the step's gradient.
        rate: the learning rate.
    """

    batches: int
    rows: list[list[int]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    waited: float = 0.0
    worked: float = 0.0
    norm: float = math.nan
    rate: float = math.nan

    @property
    def is_whole(self) -> bool:
        """Whether all batches are there."""
        return len(self.rows) == self.batches


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or SIGINT into a wish that the loop asks for; a second one acts at once."""
    received: list[int] = []
    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def remember(number: int, _: Any) -> None:
        received.append(number)
        for each, handler in earlier.items():
            signal.signal(each, handler)
        _LOG.warning("%s: saving after this step; a second one ends at once", signal.Signals(number).name)

    for number in earlier:
        signal.signal(number, remember)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
