"""Checkpoints: exact, whole or absent, the best kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from common.errors import InputError, StageError
from common.train_checkpoints import StepCheckpointer, newest_step


class Config:
    def to_dict(self) -> dict[str, int]:
        return {"hidden_size": 3}


class Model(nn.Module):
    """As much of a drafter as a checkpointer looks at."""

    _keys_to_ignore_on_save = ("verifier.weight",)
    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.verifier = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)


def trained(steps: int) -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def step(model: Model, optimizer: torch.optim.Optimizer, scheduler: object) -> None:
    optimizer.zero_grad()
    model.layer(torch.tensor([0.1, 0.2, 0.3])).square().sum().backward()
    optimizer.step()
    scheduler.step()  # type: ignore[attr-defined]


def save(folder: Path, at: int) -> None:
    model, optimizer, scheduler = trained(at)
    StepCheckpointer(folder).save_step(at, model, [optimizer], [scheduler], {"epoch": 0, "local_step": at})


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    save(tmp_path, 2)
    resumed = StepCheckpointer(tmp_path)
    assert resumed.previous_epoch == 2
    assert resumed.state() == {"epoch": 0, "local_step": 2}
    model, optimizer, scheduler = trained(0)
    resumed.load_model_state_dict(model)
    resumed.load_optimizer_state_dict(model, [optimizer])
    resumed.load_scheduler_state_dict([scheduler])
    step(model, optimizer, scheduler)
    wanted, other, _ = trained(3)
    assert torch.equal(model.layer.weight, wanted.layer.weight)
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_the_verifiers_tensors_are_not_in_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 1)
    assert sorted(load_file(tmp_path / "1" / "model.safetensors")) == ["layer.bias", "layer.weight"]
    assert json.loads((tmp_path / "1" / "config.json").read_text()) == {"hidden_size": 3}


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".2.tmp").mkdir()
    (tmp_path / ".2.tmp" / "model.safetensors").write_bytes(b"half")
    assert newest_step(tmp_path) == 1
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2
    assert not (tmp_path / ".2.tmp").exists()


def test_no_folder_has_no_step(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "nowhere") is None


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for at in (1, 2, 3, 4):
        save(tmp_path, at)
    (tmp_path / ".5.tmp").mkdir()
    checkpointer = StepCheckpointer(tmp_path)
    checkpointer.update_best_symlink(1)
    checkpointer.update_best_symlink(2)
    checkpointer.prune(keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "checkpoint_best"]
    assert checkpointer.read_best_epoch() == 2


def test_a_failed_write_leaves_the_earlier_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model, optimizer, _ = trained(2)
    model.layer.weight = nn.Parameter(model.layer.weight.detach().to_sparse())  # safetensors refuses it
    with pytest.raises((StageError, ValueError)):
        StepCheckpointer(tmp_path).save_step(2, model, [optimizer], [], {})
    assert newest_step(tmp_path) == 1


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model = trained(0)[0]
    other = nn.Module()
    other.layer, other._keys_to_ignore_on_save = nn.Linear(2, 2), ()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"1/model\.safetensors cannot be loaded.*--no-resume"):
        StepCheckpointer(tmp_path).load_model_state_dict(other)
    path = tmp_path / "1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=r"1/model\.safetensors cannot be loaded"):
        StepCheckpointer(tmp_path).load_model_state_dict(model)


def test_measures_of_a_checkpoint_read_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpointer = StepCheckpointer(tmp_path)
    assert checkpointer.val_metrics(1) is None
    checkpointer.save_val_metrics(1, {"acceptance_length": 1.25})
    assert checkpointer.val_metrics(1) == {"acceptance_length": 1.25}
