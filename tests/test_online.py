"""States from a server: what it names is fetched only where it may be, checked, and not left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import InputError, StageError
from common.hidden_states import Damaged, HiddenStateStore
from common.online import ServerTransfer

STATES = torch.arange(1, 5 * 4 * 8 + 1).reshape(5, 4, 8).bfloat16()
IDS = torch.arange(5)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def transfer(shared: Path) -> ServerTransfer:
    return ServerTransfer(HiddenStateStore(shared, 8), [1, 2, 3, 6], ["python", "-m", "vllm"])


def named(path: Path, states: torch.Tensor = STATES) -> dict[str, object]:
    save_file({"hidden_states": states, "token_ids": IDS}, path)
    return {"hidden_states_path": str(path), "layer_ids": [1, 2, 3, 6]}


def test_a_file_in_the_shared_folder_is_read_and_removed(shared: Path, transfer: ServerTransfer) -> None:
    found = transfer.get_generated(named(shared / "a.safetensors"))
    assert found is not None
    assert torch.equal(found["hidden_states"], STATES)
    assert torch.equal(found["token_ids"], IDS)
    assert os.listdir(shared) == []
    transfer.delete(str(shared / "a.safetensors"))
    assert transfer.get_cached(0) is None


def test_a_path_outside_is_neither_read_nor_removed(tmp_path: Path, transfer: ServerTransfer) -> None:
    outside = tmp_path / "outside.safetensors"
    with pytest.raises(InputError, match="outside the shared folder"):
        transfer.get_generated(named(outside))
    # speculators' data set calls this with the server's path after every failure.
    transfer.delete(str(outside))
    assert outside.exists()


def test_a_link_is_not_followed(tmp_path: Path, shared: Path, transfer: ServerTransfer) -> None:
    named(tmp_path / "outside.safetensors")
    (shared / "link").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(StageError, match="a link, no regular file"):
        transfer.get_generated({"hidden_states_path": str(shared / "link"), "layer_ids": [1, 2, 3, 6]})
    assert (tmp_path / "outside.safetensors").exists()


def test_other_layers_and_damaged_states_are_refused(shared: Path, transfer: ServerTransfer) -> None:
    with pytest.raises(
        InputError, match=r"captures the layers \[1, 2, 4, 6\], this run wants \[1, 2, 3, 6\]"
    ):
        transfer.get_generated(named(shared / "a.safetensors") | {"layer_ids": [1, 2, 4, 6]})
    spoilt = STATES.clone()
    spoilt[3, 1] = 0
    with pytest.raises(Damaged, match="state 1 at position 3: all values are zero"):
        transfer.get_generated(named(shared / "b.safetensors", spoilt))
