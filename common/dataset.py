"""`dataset/`: training rows on disk, as speculators 0.9.0 reads them (`save_to_disk`, torch format)."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from common import atomic_io
from common.errors import InputError, StageError

if TYPE_CHECKING:
    import datasets
    import pyarrow

_ROWS = "data-00000-of-00001.arrow"
_LAST = "state.json"
_ROWS_AT_ONCE = 1000


class TrainingRow(TypedDict):
    """One answer with the prompt that the model saw.

    Attributes:
        input_ids: [T] token ids of prompt and answer.
        loss_mask: [T] of 0 and 1; 1 where the model generated the token.
        seq_len: T.
        id: the prompt's id, `#`, and the turn.
        source: where the prompt comes from.
    """

    input_ids: list[int]
    loss_mask: list[int]
    seq_len: int
    id: str
    source: str


def write(folder: Path, rows: Iterable[TrainingRow], more: Sequence[str] = ()) -> int:
    """Stream rows into a data set in `folder`, in constant memory; whole or absent.

    The files are built in a subfolder and moved; `state.json`, without which nothing loads, comes last.
    Other files in `folder` (its lock, its manifest) are left alone.

    Args:
        folder: usually `RUN/dataset`.
        rows: any iterable, read once.
        more: further columns of the rows, integers.

    Returns:
        The number of rows.

    Raises:
        StageError: there was no row at all, or a row contradicts itself.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # int32 and uint8 take 5 bytes a token where int64 takes 16; the torch format reads both as int64.
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("uint8")),
            "seq_len": datasets.Value("int32"),
            "id": datasets.Value("string"),
            "source": datasets.Value("string"),
            **{name: datasets.Value("int32") for name in more},
        }
    )
    building = folder / ".building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        count = 0
        with ArrowWriter(path=str(building / _ROWS), features=features) as writer:
            for row in rows:
                _check(row)
                writer.write(dict(row))
                count += 1
            writer.finalize()
        if not count:
            raise StageError(f"{folder}: not one training row was made, so there is nothing to train on")
        _save(features, building)
        move(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return count


def move(built: Path, folder: Path) -> None:
    """Put finished files, a data set or any others, into `folder`.

    What makes a data set loadable goes first and comes last.
    """
    (folder / _LAST).unlink(missing_ok=True)
    for old in folder.glob("data-*.arrow"):
        old.unlink()
    for file in sorted(built.iterdir(), key=lambda path: path.name == _LAST):
        with file.open("rb") as content:
            os.fsync(content.fileno())
        # A link may have put the folder on another disk.
        shutil.move(file, folder / file.name)
    atomic_io.sync_folder(folder)


def load(folder: Path) -> datasets.Dataset:
    """Load a data set in torch format: `input_ids` and `loss_mask` come as [T] int64 tensors.

    Raises:
        InputError: the folder is absent, damaged, or lacks a column.
    """
    import datasets

    if not (folder / _LAST).exists():
        state = "is not finished or no data set" if folder.exists() else "does not exist"
        raise InputError(
            f"{folder} {state} ({_LAST} is absent). Run `01_prepare_data.py --answers keep` or "
            "`01b_generate_synthetic.py` first."
        )
    try:
        rows = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder} is damaged and cannot be loaded: {error}. Make it again with --overwrite."
        ) from error
    absent = {"input_ids", "loss_mask"} - set(rows.column_names)
    if absent:
        raise InputError(f"{folder} has no column {', '.join(sorted(absent))}; found {rows.column_names}")
    return rows.with_format("torch")


def batches(rows: datasets.Dataset, columns: Sequence[str]) -> Iterator[pyarrow.Table]:
    """Some columns of a data set, about a thousand rows at a time, in constant memory.

    They are read from the files: all that was read of the table that `datasets` maps into memory stays there.

    Args:
        rows: as `load` gives them.
        columns: names.
    """
    import pyarrow

    files = [file["filename"] for file in rows.cache_files]
    if not files or rows._indices is not None:  # made in memory, or a choice of rows
        yield from rows.select_columns([*columns]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        return
    for name in files:
        with pyarrow.OSFile(name) as file, pyarrow.ipc.open_stream(file) as stream:
            for batch in stream:
                yield pyarrow.Table.from_batches([batch]).select([*columns])


def ids(rows: datasets.Dataset) -> list[str]:
    """The `id` of each row; its number in a data set that has none."""
    plain = rows.with_format(None)
    return list(plain["id"]) if "id" in plain.column_names else [str(row) for row in range(len(plain))]


def _check(row: TrainingRow) -> None:
    length = len(row["input_ids"])
    if not length == len(row["loss_mask"]) == row["seq_len"]:
        raise StageError(
            f"row {row['id']}: {length} input_ids, {len(row['loss_mask'])} loss_mask, "
            f"seq_len {row['seq_len']}; they must be equal, or the loss would fall on wrong tokens unnoticed"
        )


def _save(features: datasets.Features, building: Path) -> None:
    """Put what `save_to_disk` writes around the rows: its own copy would map them all into memory."""
    import datasets

    empty = datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    empty.with_format("torch").save_to_disk(building / "empty")
    state = atomic_io.read_json(building / "empty" / _LAST)
    state["_data_files"] = [{"filename": _ROWS}]
    # Of its own, or caches of `datasets` would take all our data sets for one.
    state["_fingerprint"] = secrets.token_hex(8)
    atomic_io.write_json(building / _LAST, state)
    (building / "empty" / "dataset_info.json").rename(building / "dataset_info.json")
    shutil.rmtree(building / "empty")
