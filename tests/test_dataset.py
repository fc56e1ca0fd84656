"""The training rows' folder: speculators' format, written in one piece, loaded or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common import dataset
from common.dataset import TrainingRow
from common.errors import InputError, StageError


def row(number: int, length: int = 3) -> TrainingRow:
    return TrainingRow(
        input_ids=[number] * length,
        loss_mask=[0] + [1] * (length - 1),
        seq_len=length,
        id=f"{number:032x}#0",
        source="test",
    )


def test_rows_come_back_as_int64_tensors_in_their_order(tmp_path: Path) -> None:
    assert dataset.write(tmp_path / "dataset", (row(n) for n in range(2500))) == 2500
    loaded = dataset.load(tmp_path / "dataset")
    assert len(loaded) == 2500
    assert torch.equal(loaded[2400]["input_ids"], torch.tensor([2400, 2400, 2400]))
    assert torch.equal(loaded[2400]["loss_mask"], torch.tensor([0, 1, 1]))
    assert loaded[7]["id"] == "00000000000000000000000000000007#0"
    assert loaded[7]["seq_len"] == 3


def test_speculators_own_reader_opens_the_folder(tmp_path: Path) -> None:
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    dataset.write(tmp_path / "dataset", [row(1), row(2, length=5)])
    theirs = ArrowDataset(
        max_len=16,
        datapath=tmp_path / "dataset",
        transfer=FileTransfer(tmp_path / "hidden_states"),
        on_missing="raise",
    )
    assert list(theirs.approx_lengths) == [3, 5]


def test_kimis_largest_id_fits(tmp_path: Path) -> None:
    dataset.write(tmp_path, [row(163839)])
    assert dataset.load(tmp_path)[0]["input_ids"].tolist() == [163839] * 3


def test_writing_again_leaves_nothing_of_the_old_rows_and_spares_other_files(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    dataset.write(tmp_path, (row(n) for n in range(10)))
    dataset.write(tmp_path, [row(77)])
    assert dataset.load(tmp_path)["input_ids"][0].tolist() == [77, 77, 77]
    assert len(dataset.load(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]


def test_rows_that_fail_half_way_leave_the_old_data_set_whole(tmp_path: Path) -> None:
    def failing() -> Iterator[TrainingRow]:
        yield row(2)
        raise StageError("the source broke off")

    dataset.write(tmp_path, [row(1)])
    with pytest.raises(StageError, match="broke off"):
        dataset.write(tmp_path, failing())
    assert dataset.load(tmp_path)[0]["input_ids"].tolist() == [1, 1, 1]
    assert not (tmp_path / ".building").exists()


def test_no_row_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="not one training row"):
        dataset.write(tmp_path, [])
    assert not (tmp_path / "state.json").exists()


def test_a_mask_of_another_length_is_refused_with_the_rows_id(tmp_path: Path) -> None:
    bad = row(5)
    bad["loss_mask"] = [1]
    with pytest.raises(StageError, match="0005#0: 3 input_ids, 1 loss_mask, seq_len 3"):
        dataset.write(tmp_path, [bad])


def test_an_absent_or_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent does not exist"):
        dataset.load(tmp_path / "absent")
    dataset.write(tmp_path / "d", [row(1)])
    (tmp_path / "d" / "data-00000-of-00001.arrow").write_bytes(b"torn")
    with pytest.raises(InputError, match="is damaged and cannot be loaded"):
        dataset.load(tmp_path / "d")
    (tmp_path / "d" / "state.json").unlink()
    with pytest.raises(InputError, match="is not finished or no data set"):
        dataset.load(tmp_path / "d")
