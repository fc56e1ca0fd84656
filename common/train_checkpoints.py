"""Checkpoints to resume from: float32, whole or absent, named after their step, files as speculators' own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators.train.checkpointer import BaseCheckpointer, OptimizerOrList
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from common import atomic_io
from common.errors import InputError, StageError
from common.processes import is_main, main_decides

_STATE = "training_state.json"


class StepCheckpointer(BaseCheckpointer):
    """speculators' checkpointer with three differences: exact, atomic, and one folder a step.

    speculators' own rounds weights and optimizer to bfloat16, so that a resumed run is another run, and
    writes into the folder that it replaces, so that a kill leaves neither. `previous_epoch`, the number of
    the newest folder, counts finished steps here; it is -1 without a checkpoint. Only the main process
    writes.
    """

    def load_model_state_dict(self, model: Any, float_dtype: torch.dtype | None = None) -> None:
        """Put the newest weights into `model`, whole or sharded, float32 as they are.

        Raises:
            InputError: the file is damaged or of another drafter.
        """
        path = self.model_path(self.previous_epoch)
        own = model.state_dict()
        try:
            stored = {name: _placed(t, own.get(name)) for name, t in load_file(path).items()}
            missing, unexpected = model.load_state_dict(stored, strict=False)
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
            parameters = [parameter for group in one.param_groups for parameter in group["params"]]
            for number, moments in state["state"].items():
                like = parameters[number]
                for name, moment in moments.items():
                    if moment.shape == like.shape:  # `step` is a plain number
                        moments[name] = _placed(moment, like)
            one.load_state_dict(state)

    def save_checkpoint(
        self,
        model: Any,
        optimizer: OptimizerOrList,
        epoch: int | str,
        float_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Write model and optimizers into the folder of `epoch`, which is the caller's to make whole.

        Sharded tensors are gathered one by one, so that the files are the same with and without FSDP.
        """
        raw = model.module if isinstance(model, DistributedDataParallel) else model
        weights = {n: t for n, t in raw.state_dict().items() if n not in raw._keys_to_ignore_on_save}
        whole = _whole(weights)
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        states = [_whole(one.state_dict()) for one in optimizers]

        def write() -> None:
            with self._writing(epoch) as folder:
                folder.mkdir(parents=True, exist_ok=True)
                tensors = {name: tensor.contiguous() for name, tensor in whole.items()}
                save_file(tensors, self.model_path(epoch), metadata={"format": "pt"})
                atomic_io.write_json(folder / "config.json", raw.config.to_dict())
                torch.save(states[0] if len(states) == 1 else states, self.optimizer_path(epoch))

        main_decides(write)

    def save_step(
        self, step: int, model: Any, optimizers: list[Any], schedulers: list[Any], state: dict[str, Any]
    ) -> None:
        """Write a whole checkpoint aside, sync it, and give it its name; every process takes part.

        Args:
            step: finished steps; a checkpoint of that step that is there already stays.
            model: the drafter, wrapped for several processes or not.
            optimizers: as the trainer has them.
            schedulers: as the trainer has them.
            state: what else a resumed run needs.

        Raises:
            StageError: the disk is full or cannot be written.
        """
        aside = f".{step}.tmp"

        def begin() -> bool:
            shutil.rmtree(self.path / aside, ignore_errors=True)
            return not (self.path / str(step)).exists()

        def finish() -> None:
            with self._writing(aside) as folder:
                states = [one.state_dict() for one in schedulers]
                torch.save(states[0] if len(states) == 1 else states, self.scheduler_path(aside))
                atomic_io.write_json(folder / _STATE, state)
                for file in folder.iterdir():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
                atomic_io.sync_folder(folder)
                folder.rename(self.path / str(step))
                atomic_io.sync_folder(self.path)

        if main_decides(begin):
            self.save_checkpoint(model, optimizers, aside)
            main_decides(finish)

    @contextmanager
    def _writing(self, epoch: int | str) -> Iterator[Path]:
        folder = self.path / str(epoch)
        try:
            yield folder
        except (OSError, SafetensorError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StageError(
                f"{folder} could not be written: {error}. The checkpoints before it are whole: free some "
                "space and run the same command again."
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


def _placed(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A whole tensor, cut as `like` is where that one is sharded; every process cuts its own copy."""
    if not isinstance(like, DTensor):
        return tensor
    whole = tensor.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _whole(states: dict[str, Any]) -> dict[str, Any]:
    """Sharded tensors gathered on every process, copied to the CPU on the main one alone."""

    def gather(value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.detach().cpu() if isinstance(value, torch.Tensor) and is_main() else value

    return pytree.tree_map(gather, states)
