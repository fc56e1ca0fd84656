"""The store keeps what is right, whole and this run's own, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import StageError
from common.hidden_states import CaptureRow, Damaged, DiskFull, HiddenStateStore
from common.store_forms import StoreForm

H = 8


def states_of(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 4, H, generator=generator).bfloat16()


def row_of(length: int, index: int = 0) -> CaptureRow:
    return CaptureRow(index, torch.arange(length) + 7, torch.ones(length, dtype=torch.int64))


@pytest.fixture
def store(tmp_path: Path) -> HiddenStateStore:
    (tmp_path / "hidden_states").mkdir()
    return HiddenStateStore(tmp_path / "hidden_states", H)


@pytest.fixture
def server_file(store: HiddenStateStore) -> Path:
    """What a server wrote for `row_of(5)`."""
    file = store.folder / "cmpl-1.safetensors"
    save_file({"hidden_states": states_of(5), "token_ids": torch.arange(5) + 7}, file)
    return file


def test_a_written_row_is_read_back_bit_by_bit(store: HiddenStateStore) -> None:
    store.write(3, torch.arange(5), states_of(5))
    token_ids, states = store.read(3)
    assert token_ids.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(states, states_of(5))
    assert [path.name for path in store.folder.iterdir()] == ["hs_3.safetensors"]


def test_speculators_reads_the_store(store: HiddenStateStore) -> None:
    from hs_connectors import FileTransfer

    store.write(3, torch.arange(5), states_of(5))
    sample = FileTransfer(store.folder).get_cached(3)
    assert sample is not None
    assert sample["hidden_states"].shape == (5, 4, H)
    assert sample["hidden_states"].dtype == torch.bfloat16
    assert sample["token_ids"].dtype == torch.int64


def test_the_need_for_kimi_is_57344_bytes_of_states_a_token(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path, 7168)
    assert store.bytes_per_token == 57344 + 8
    assert store.formula == "(4 states x H 7168 x 2 B + 8 B of token id)"
    assert store.bytes_of({0: 1000, 1: 2000}) == 3000 * 57352 + 2 * 400


def test_the_need_is_what_the_files_take(store: HiddenStateStore) -> None:
    store.write(0, torch.arange(50), states_of(50))
    store.write(1, torch.arange(9), states_of(9))
    taken = sum(path.stat().st_size for path in store.folder.iterdir())
    assert 0 <= store.bytes_of({0: 50, 1: 9}) - taken < 600


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (lambda s: s[:, :3], "shape", r"\[5, 3, 8\]"),
        (lambda s: s[:4], "shape", r"\[4, 4, 8\]"),
        (lambda s: s.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan).bfloat16()),
         "not_finite", "state 1 at position 2"),
        (lambda s: s.index_put((torch.tensor(4), torch.tensor(3)), torch.tensor(torch.inf).bfloat16()),
         "not_finite", "state 3 at position 4"),
        (lambda s: s.index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(0.0).bfloat16()),
         "zero", "state 2 at position 0"),
    ],
)  # fmt: skip
def test_spoilt_states_are_not_stored(store: HiddenStateStore, spoil, reason: str, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Damaged, match=words) as caught:
        store.write(0, torch.arange(5), spoil(states_of(5)))
    assert caught.value.reason == reason
    assert list(store.folder.iterdir()) == []


def test_only_files_with_the_rows_own_length_count_as_done(store: HiddenStateStore) -> None:
    store.write(0, torch.arange(5), states_of(5))
    store.write(1, torch.arange(5), states_of(5))
    store.path(2).write_bytes(store.path(0).read_bytes()[:-10])
    store.path(3).write_bytes(b"")
    assert store.done({0: 5, 1: 6, 2: 5, 3: 5, 4: 5}) == {0}


def test_a_servers_file_is_taken_over_by_renaming(store: HiddenStateStore, server_file: Path) -> None:
    inode = server_file.stat().st_ino
    with store.adopting(row_of(5), server_file) as states:
        assert torch.equal(states, states_of(5))
        assert not store.path(0).exists()
    assert store.path(0).stat().st_ino == inode
    assert [path.name for path in store.folder.iterdir()] == ["hs_0.safetensors"]


def test_a_servers_file_in_another_precision_is_stored_as_bfloat16(store: HiddenStateStore) -> None:
    file = store.folder / "cmpl-1.safetensors"
    save_file({"hidden_states": states_of(5).half(), "token_ids": torch.arange(5) + 7}, file)
    with store.adopting(row_of(5), file):
        pass
    assert load_file(store.path(0))["hidden_states"].dtype == torch.bfloat16
    assert [path.name for path in store.folder.iterdir()] == ["hs_0.safetensors"]


def test_a_file_that_a_check_refuses_leaves_nothing(store: HiddenStateStore, server_file: Path) -> None:
    def take() -> None:
        with store.adopting(row_of(5), server_file):
            raise Damaged("content", "wrong")

    with pytest.raises(Damaged):
        take()
    assert list(store.folder.iterdir()) == []


def test_a_file_of_another_row_is_refused(store: HiddenStateStore, server_file: Path) -> None:
    other = CaptureRow(0, torch.tensor([7, 8, 99, 10, 11]), torch.ones(5))
    with pytest.raises(Damaged, match="token id 9 at position 2 where the row has 99"):
        store.adopting(other, server_file).__enter__()


def test_half_a_file_of_a_server_is_damaged(store: HiddenStateStore, server_file: Path) -> None:
    server_file.write_bytes(server_file.read_bytes()[:-20])
    with pytest.raises(Damaged) as caught:
        store.adopting(row_of(5), server_file).__enter__()
    assert caught.value.reason == "unreadable"


def test_a_link_in_place_of_a_servers_file_is_not_read(store: HiddenStateStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file({"hidden_states": states_of(5), "token_ids": torch.arange(5) + 7}, secret)
    link = store.folder / "cmpl-1.safetensors"
    link.symlink_to(secret)
    with pytest.raises(StageError, match="a link"):
        store.adopting(row_of(5), link).__enter__()
    assert secret.exists()
    assert list(store.folder.iterdir()) == []


# --------------------------------------------------------------------------------------------------------
# A kill at any moment, a full disk


def write_for_ever(folder: Path, form: StoreForm) -> None:
    store = HiddenStateStore(folder, 512, form=form)
    states = torch.ones(200, 4, 512).bfloat16()
    for row in range(100_000):
        store.write(row, torch.arange(200), states)


@pytest.mark.parametrize("form", [StoreForm(), StoreForm("fp8", "zstd")], ids=str)
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path, form: StoreForm) -> None:
    store = HiddenStateStore(tmp_path, 512, form=form)
    process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(tmp_path, form))
    process.start()
    while len(list(tmp_path.glob("hs_*"))) < 5 and process.is_alive():
        time.sleep(0.003)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    files = sorted(tmp_path.glob("hs_*"))
    assert len(files) >= 5
    assert store.done(dict.fromkeys(range(len(files)), 200)) == set(range(len(files)))
    for row in range(len(files)):
        store.check_form(*store.read(row))
    store.sweep()
    assert sorted(tmp_path.iterdir()) == files


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_what_was_written_is_whole(small_disk: Path) -> None:
    store = HiddenStateStore(small_disk, 512)
    states = torch.ones(100, 4, 512).bfloat16()  # 0.41 MB
    store.write(0, torch.arange(100), states)
    store.write(1, torch.arange(100), states)
    with pytest.raises(DiskFull, match="the disk is full"):
        store.write(2, torch.arange(100), states)
    assert store.done({0: 100, 1: 100, 2: 100}) == {0, 1}
    assert not list(small_disk.glob(".*.tmp"))


def test_a_servers_half_written_file_on_a_full_disk_is_the_disks_fault(small_disk: Path) -> None:
    store = HiddenStateStore(small_disk, 512)
    (small_disk / "filler").write_bytes(bytes(900_000))
    half = small_disk / "cmpl-1.safetensors"
    half.write_bytes(bytes(50_000))
    with pytest.raises(DiskFull):
        store.adopting(row_of(100), half).__enter__()
