"""Checkpoints to resume from: float32, whole or absent, named after their step, files as speculators' own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators.train.checkpointer import BaseCheckpointer, OptimizerOrList
from torch.nn.parallel import DistributedDataParallel

from common import atomic_io
from common.errors import InputError, StageError

_STATE = "training_state.json"


class StepCheckpointer(BaseCheckpointer):
    """speculators' checkpointer with three differences: exact, atomic, and one folder a step.

    speculators' own rounds weights and optimizer to bfloat16, so that a resumed run is another run, and
    writes into the folder that it replaces, so that a kill leaves neither. `previous_epoch`, the number of
    the newest folder, counts finished steps here; it is -1 without a checkpoint. Only the main process
    writes.
    """

    def load_model_state_dict(self, model: Any, float_dtype: torch.dtype | None = None) -> None:
        """Put the newest weights into `model`, float32 as they are.

        Raises:
            InputError: the file is damaged or of another drafter.
        """
        path = self.model_path(self.previous_epoch)
        try:
            missing, unexpected = model.load_state_dict(load_file(path), strict=False)
        except (SafetensorError, OSError, RuntimeError) as error:
            what = " ".join(str(error).split()).rstrip(".")
            raise InputError(f"{path} cannot be loaded: {what}. Pass --no-resume to start again.") from None
        wrong = [*unexpected, *(name for name in missing if name not in model._keys_to_ignore_on_save)]
        if wrong:
            raise InputError(f"{path} is of another drafter ({wrong[0]}). Pass --no-resume to start again.")

    def load_optimizer_state_dict(
        self, model: Any, optimizer: OptimizerOrList, float_dtype: torch.dtype | None = None
    ) -> None:
        """Put the newest moments and step counts into the optimizers, in the dtype that they had."""
        path = self.optimizer_path(self.previous_epoch)
        loaded = torch.load(path, weights_only=True, map_location="cpu")
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        for one, state in zip(optimizers, loaded if isinstance(loaded, list) else [loaded], strict=True):
            one.load_state_dict(state)

    def save_checkpoint(
        self,
        model: Any,
        optimizer: OptimizerOrList,
        epoch: int | str,
        float_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Write model and optimizers into the folder of `epoch`, which is the caller's to make whole."""
        raw = model.module if isinstance(model, DistributedDataParallel) else model
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        folder = self.path / str(epoch)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in raw.state_dict().items()
            if name not in raw._keys_to_ignore_on_save
        }
        save_file(weights, self.model_path(epoch), metadata={"format": "pt"})
        atomic_io.write_json(folder / "config.json", raw.config.to_dict())
        states = [one.state_dict() for one in optimizers]
        torch.save(states[0] if len(states) == 1 else states, self.optimizer_path(epoch))

    def save_step(
        self, step: int, model: Any, optimizers: list[Any], schedulers: list[Any], state: dict[str, Any]
    ) -> None:
        """Write a whole checkpoint aside, sync it, and give it its name.

        Args:
            step: finished steps; a checkpoint of that step that is there already stays.
            model: the drafter, wrapped for several processes or not.
            optimizers: as the trainer has them.
            schedulers: as the trainer has them; none for a constant learning rate.
            state: what else a resumed run needs.

        Raises:
            StageError: the disk is full or cannot be written.
        """
        if (self.path / str(step)).exists():
            return
        aside = f".{step}.tmp"
        try:
            shutil.rmtree(self.path / aside, ignore_errors=True)
            self.save_checkpoint(model, optimizers, aside)
            if schedulers:
                states = [one.state_dict() for one in schedulers]
                torch.save(states[0] if len(states) == 1 else states, self.scheduler_path(aside))
            atomic_io.write_json(self.path / aside / _STATE, state)
            for file in (self.path / aside).iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            atomic_io.sync_folder(self.path / aside)
            (self.path / aside).rename(self.path / str(step))
            atomic_io.sync_folder(self.path)
        except (OSError, SafetensorError, RuntimeError) as error:
            shutil.rmtree(self.path / aside, ignore_errors=True)
            raise StageError(
                f"{self.path / str(step)} could not be written: {error}. The checkpoints before it are "
                "whole: free some space and run the same command again."
            ) from error

    def state(self) -> dict[str, Any]:
        """The newest checkpoint's `state` of `save_step`."""
        return atomic_io.read_json(self.path / str(self.previous_epoch) / _STATE)

    def save_val_metrics(self, epoch: int, val_metrics: dict[str, Any]) -> None:
        """Record what was measured on the held-out rows, whole or not at all."""
        atomic_io.write_json(self.val_metrics_path(epoch), val_metrics)

    def val_metrics(self, step: int) -> dict[str, Any] | None:
        """What `save_val_metrics` recorded; None for a checkpoint that was not measured."""
        path = self.val_metrics_path(step)
        return atomic_io.read_json(path) if path.exists() else None

    def update_best_symlink(self, epoch: int) -> None:
        """Point `checkpoint_best` at that step, by one rename."""
        link = self.path / ".checkpoint_best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(str(epoch), target_is_directory=True)
        link.replace(self.best_path())

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest `keep_last` checkpoints and the best one, and what a kill left aside."""
        steps = self.steps()
        kept = {*steps[-keep_last:], self.read_best_epoch()}
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.path / str(step))
        for left in self.path.glob(".*.tmp"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(int(path.name) for path in self.path.iterdir() if path.name.isdigit())


def newest_step(folder: Path) -> int | None:
    """The newest whole checkpoint in `checkpoints/`, None without one."""
    found = StepCheckpointer(folder).previous_epoch
    return None if found < 0 else found
