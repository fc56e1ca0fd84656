"""The part of a data set that training reads, and the data set of just that part beside its states.

`shift_batch` puts token t + 1 beside the state of t, and the loss of every TTT step falls on supervised
tokens of the row: what stands behind the last one is read in no step, by no query before it. speculators
wants `token_ids == input_ids` of each row, so what is left out of the states is left out of a data set
`hidden_states/rows/`, too; `dataset/`, from which 02 counted, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import dataset, manifest
from common.partition import Rows

if TYPE_CHECKING:
    import datasets

FOLDER = "rows"
# A TTT step k reads masks k positions further on, in a packed batch those of the next row. While the first
# K of a row are not supervised it finds none there; no chain is as long as this.
SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Kept:
    """Rows of a data set, and the part of each whose states are kept.

    Attributes:
        rows: [N] int64, numbers in the full data set, ascending; the N kept rows are numbered anew from 0.
        start: [N] int64, the first token that is kept.
        stop: [N] int64, behind the last one.
    """

    rows: Rows
    start: Rows
    stop: Rows

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> Kept:
        """Everything.

        Args:
            lengths: tokens of each row.
        """
        stop = np.array(lengths, np.int64)
        return cls(np.arange(len(stop)), np.zeros_like(stop), stop)

    @classmethod
    def supervised(cls, data: datasets.Dataset, context: int | None) -> Kept:
        """Rows with a supervised token, each up to its last one.

        Args:
            data: `dataset/`.
            context: tokens before the first supervised one that are kept; all of them for None.
        """
        found = []
        for row, mask in enumerate(masks(data)):
            # Position 0 has no loss, as nothing predicts it.
            supervised = np.flatnonzero(mask[1:]) + 1
            if len(supervised):
                start = 0 if context is None else max(0, supervised[0] - context)
                found.append((row, start, supervised[-1] + 1))
        columns = np.array(found, np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    @classmethod
    def load(cls, folder: Path) -> Kept:
        """What `write` has left in a folder."""
        plain = dataset.load(folder).with_format("numpy")
        start = plain["start"][:].astype(np.int64)
        return cls(plain["row"][:].astype(np.int64), start, start + plain["seq_len"][:])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Rows:
        """[N] int64, tokens that are kept."""
        return self.stop - self.start

    def select(self, which: Rows) -> Kept:
        """Some of the kept rows, numbered anew."""
        return Kept(self.rows[which], self.start[which], self.stop[which])

    def counts(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Where the rows and tokens of the full data set went.

        Args:
            lengths: tokens of each of the M rows of the full data set.

        Returns:
            `{read, written, dropped: {reason: rows}, tokens: {read, written, reason: ...}}`.
        """
        whole = np.array(lengths, np.int64)
        tokens = {
            "read": int(whole.sum()),
            "written": int(self.lengths.sum()),
            "in_rows_without_supervised": int(whole.sum() - whole[self.rows].sum()),
            "after_the_last_supervised": int((whole[self.rows] - self.stop).sum()),
            "before_the_context": int(self.start.sum()),
        }
        dropped = {"no_supervised_token": len(lengths) - len(self)}
        return {"read": len(lengths), "written": len(self), "dropped": dropped, "tokens": tokens}

    def fitted_counts(self, counts: dict[str, Any], which: Rows) -> dict[str, Any]:
        """`counts`, after some more rows were left out because the disk has no room.

        Args:
            counts: from `counts`.
            which: of the kept rows, those that stay.
        """
        left = int(self.lengths[which].sum())
        dropped = counts["dropped"] | {"no_space": len(self) - len(which)}
        tokens = counts["tokens"] | {"written": left, "no_space": int(self.lengths.sum()) - left}
        return counts | {"written": len(which), "dropped": dropped, "tokens": tokens}


def masks(data: datasets.Dataset) -> Iterator[Any]:
    """Each row's `loss_mask` [T], without the cost of making tensors."""
    for table in dataset.batches(data, ("loss_mask",)):
        column = table["loss_mask"].combine_chunks()
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        yield from np.split(column.flatten().to_numpy(zero_copy_only=False), ends[:-1])


def recorded(folder: Path, making: manifest.Manifest, *, accept_stale: bool) -> Kept | None:
    """What an earlier run of the same making has written; None without.

    Args:
        folder: `hidden_states/rows`.
        making: its config and inputs.
        accept_stale: take it although an input changed.
    """
    if not (folder / manifest.NAME).exists():
        return None
    found = manifest.read(folder, f"{making.stage}.py")
    same = found.config == making.config and (accept_stale or found.inputs == making.inputs)
    return Kept.load(folder) if same else None


def write(folder: Path, data: datasets.Dataset, kept: Kept, making: manifest.Manifest) -> None:
    """Write the kept parts as a data set with two more columns: `row` in the full one, and `start` in it.

    Args:
        folder: `hidden_states/rows`.
        data: the full data set.
        kept: of it.
        making: config, inputs and counts, written last.
    """
    (folder / manifest.NAME).unlink(missing_ok=True)
    plain = data.with_format("numpy")

    def parts() -> Iterator[Any]:
        for row, start, stop in zip(kept.rows.tolist(), kept.start.tolist(), kept.stop.tolist(), strict=True):
            found = plain[row]
            yield {
                "input_ids": found["input_ids"][start:stop],
                "loss_mask": found["loss_mask"][start:stop],
                "seq_len": stop - start,
                "id": str(found.get("id", row)),
                "source": str(found.get("source", "all")),
                "row": row,
                "start": start,
            }

    dataset.write(folder, parts(), more=("row", "start"))
    making.write(folder)
