"""The store of hidden states: one file a row, checked before it counts."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common import atomic_io, log, store_forms
from common.errors import StageError
from common.store_forms import StoreForm

if TYPE_CHECKING:
    import torch

_LOG = log.get("hidden_states")
_HEADER_BYTES = 400
MOST_LOGITS = 2048  # positions of a row that a backend asks about: it holds their [T, V] at once


class Damaged(StageError):
    """States of one row that must not be trained on.

    Attributes:
        reason: for counting: `unreadable`, `token_ids`, `shape`, `not_finite`, `zero` or `content`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class OnlyLookedAt(Damaged):
    """States that are right, of a row that is in the store already."""

    def __init__(self, row: CaptureRow) -> None:
        super().__init__("there", f"row {row.index} is in the store already")


class DiskFull(StageError):
    """No space is left for the next file; what was written is whole."""


@dataclass(frozen=True)
class CaptureRow:
    """One row of the data set whose states are wanted.

    Attributes:
        index: in the data set.
        token_ids: [T] int64.
        loss_mask: [T], nonzero where the token is supervised.
        start: the first position that is kept; those before it are computed and left out.
    """

    index: int
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    start: int = 0

    @property
    def kept(self) -> CaptureRow:
        """The row as it is checked and stored, [T - start]."""
        return CaptureRow(self.index, self.token_ids[self.start :], self.loss_mask[self.start :])


Outcome = StageError | None
Check = Callable[["CaptureRow", "torch.Tensor", "torch.Tensor"], None]


class Backend(Protocol):
    """What computes hidden states; one more is one more file."""

    def capture(
        self, rows: Iterable[CaptureRow], check: Check | None, *, predict: bool = False
    ) -> AsyncIterator[tuple[CaptureRow, Outcome]]:
        """Compute the states of each row and store those that pass.

        Args:
            rows: longest first, drawn lazily.
            check: called off the event loop with the kept part of the row, its states [T, A+1, H] bfloat16,
                and `said` [T] int64: the token that the verifier itself ranks first after each position, -1
                where it has not been asked. Where it raises, nothing is stored. None: nothing is asked.
            predict: ask at all positions (of long rows at the first 2,048), not only at the last one.

        Yields:
            The row, and None or the error (with a `reason`) that kept it out.

        Raises:
            StageError: anything that concerns more than one row.
        """
        ...


@dataclass(frozen=True)
class HiddenStateStore:
    """`hs_<row>.safetensors` with the states [T, A+1, H] of a row and its `token_ids [T]` int64.

    The last of the A+1 states is the last layer's output before the final norm. A file has its name only when
    it is whole and synced.

    Attributes:
        folder: usually `RUN/hidden_states`.
        hidden_size: H.
        num_aux: A.
        form: in which states lie in the files.
    """

    folder: Path
    hidden_size: int
    num_aux: int = 3
    form: StoreForm = field(default_factory=StoreForm)

    @classmethod
    def made_with(cls, facts: Mapping[str, Any], folder: Path, hidden_size: int) -> HiddenStateStore:
        """The store of a finished folder, by the facts of its manifest."""
        return cls(folder, hidden_size, len(facts["layer_ids"]), StoreForm.of(facts))

    @property
    def bytes_per_token(self) -> int:
        """Of states and token id; with compression no more than that."""
        return self.form.bytes_per_token(self.num_aux + 1, self.hidden_size)

    @property
    def formula(self) -> str:
        """How `bytes_per_token` comes about, for a first screen."""
        return self.form.formula(self.num_aux + 1, self.hidden_size)

    def bytes_of(self, lengths: Mapping[int, int]) -> int:
        """Bytes on disk of rows with these lengths in tokens; with compression no more than that."""
        return sum(lengths.values()) * self.bytes_per_token + len(lengths) * _HEADER_BYTES

    def describe(self, counts: Mapping[str, int]) -> str:
        """What the files take, for a last screen.

        Args:
            counts: `bytes` and `tokens` of the files.
        """
        plain = StoreForm().bytes_per_token(self.num_aux + 1, self.hidden_size)
        each = counts["bytes"] / max(counts["tokens"], 1)
        return (
            f"{log.human_bytes(counts['bytes'])} / {log.human_count(counts['tokens'])} tokens = "
            f"{each:.0f} B a token, {each / plain:.3f} of plain bfloat16"
        )

    def path(self, row: int) -> Path:
        """The file of a row of the data set."""
        return self.folder / f"hs_{row}.safetensors"

    def write(self, row: int, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Write a row that needs no other check than its form. Arguments and errors are `storing`'s."""
        with self.storing(row, token_ids, states):
            pass

    @contextmanager
    def storing(self, row: int, token_ids: torch.Tensor, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Round a row's states to what is kept, and write them when the block has looked at that.

        Args:
            row: index in the data set.
            token_ids: [T] int64.
            states: [T, A+1, H] in any floating point.

        Yields:
            [T, A+1, H] bfloat16, as they will be read; when the block raises, nothing is kept.

        Raises:
            Damaged: `check_form` fails.
            DiskFull: no space is left.
        """
        # Before they are rounded: fp8 has no infinity, and would make a large number of it.
        self.check_form(token_ids, states.bfloat16())
        packed = self.form.precision.pack(states)
        kept = self.form.precision.unpack(packed)
        yield kept
        content = self.form.to_bytes(token_ids, packed, list(kept.shape))
        # Aside, synced, renamed.
        with self._naming_a_full_disk(), atomic_io.replacing(self.path(row), "wb") as file:
            file.write(content)

    def read(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's `token_ids [T]` int64 and states [T, A+1, H] bfloat16.

        Raises:
            Damaged: the file cannot be read or is not of the store's form.
        """
        return _load(self.path(row), self.form)

    @contextmanager
    def adopting(self, row: CaptureRow, file: Path) -> Iterator[torch.Tensor]:
        """Take over a file that a server wrote, without rewriting it where it has our form already.

        It is renamed to a temporary name of ours before it is looked at, so that what was checked is what is
        kept. Across file systems the rename becomes a copy.

        Args:
            row: whose states these should be.
            file: gone afterwards, whether it was taken or not.

        Yields:
            [T - start, A+1, H] bfloat16, as they will be read; when the block raises, nothing is kept.

        Raises:
            Damaged: it cannot be read, holds another row, or `check_form` fails.
            DiskFull: no space is left.
        """
        with self._naming_a_full_disk(), self._taken_over(row, file) as mine:
            token_ids, states = _load(mine, None)
            check_ids(token_ids, row.token_ids)
            token_ids, states = token_ids[row.start :], states[row.start :]
            if row.start or not self._header_fits(mine, len(token_ids)):
                with self.storing(row.index, token_ids, states) as kept:
                    yield kept
                return
            self.check_form(token_ids, states)
            yield states
            with mine.open("rb") as synced:
                os.fsync(synced.fileno())
            mine.rename(self.path(row.index))
            atomic_io.sync_folder(self.folder)

    def consume(self, file: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a file that a server wrote, and remove it.

        Args:
            file: on the file system of the store.

        Returns:
            `token_ids [T]` int64 and states [T, A+1, H] bfloat16.

        Raises:
            Damaged: it cannot be read, or `check_form` fails.
        """
        import torch

        nobody = CaptureRow(0, torch.empty(0), torch.empty(0))
        with self._naming_a_full_disk(), self._taken_over(nobody, file) as mine:
            token_ids, states = _load(mine, None)
            states = states.to(torch.bfloat16)
            self.check_form(token_ids, states)
            return token_ids, states

    @contextmanager
    def _taken_over(self, row: CaptureRow, file: Path) -> Iterator[Path]:
        # Another name than the one that is written to: these states are read from the file as they are used.
        mine = self.path(row.index).with_name(f".{self.path(row.index).name}.{os.getpid()}.served.tmp")
        try:
            shutil.move(file, mine)
            # Looked at after the move: a link would have been moved as a link.
            found = mine.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in {
                os.getuid(),
                file.parent.stat().st_uid,
            }:
                raise StageError(
                    f"the server named {file}: a link, no regular file, or another user's. Not read."
                )
            yield mine
        except (Damaged, FileNotFoundError) as error:
            if isinstance(error, Damaged) and error.reason != "unreadable":
                raise
            # A server whose write failed leaves half a file or none, and says so only in its own log.
            if self.free_bytes() < 2 * self.bytes_of({row.index: len(row.token_ids)}):
                raise OSError(errno.ENOSPC, "the server could not write") from error
            if isinstance(error, Damaged):
                raise
            raise Damaged("unreadable", f"the server named {file}, which is not there") from None
        finally:
            mine.unlink(missing_ok=True)

    def check_form(self, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Check shape, dtype, that every value is finite and that no state is all zero.

        Args:
            token_ids: [T] int64.
            states: [T, A+1, H] bfloat16.

        Raises:
            Damaged: with the first position that fails.
        """
        import torch

        form = (len(token_ids), self.num_aux + 1, self.hidden_size)
        if tuple(states.shape) != form or states.dtype != torch.bfloat16 or token_ids.dtype != torch.int64:
            raise Damaged(
                "shape",
                f"hidden_states {list(states.shape)} {states.dtype} and token_ids {list(token_ids.shape)} "
                f"{token_ids.dtype}; expected {list(form)} torch.bfloat16 and [{form[0]}] torch.int64",
            )
        # One pass over the bytes, no copy: NaN and infinity show in the sum, and so does a row of zeros.
        size = torch.linalg.vector_norm(states, ord=1, dim=-1, dtype=torch.float32)
        for reason, what, bad in (
            ("not_finite", "a value is not finite", ~torch.isfinite(size)),
            ("zero", "all values are zero", size == 0),
        ):
            if bool(bad.any()):
                position, state = bad.nonzero()[0].tolist()
                raise Damaged(
                    reason,
                    f"state {state} at position {position}: {what}, as in {int(bad.sum())} of {bad.numel()}",
                )

    def done(self, lengths: Mapping[int, int]) -> set[int]:
        """Rows whose file is there and, by its header, has the row's length and our form.

        Args:
            lengths: row -> T.
        """
        names = {path.name for path in self.folder.glob("hs_*.safetensors")}
        return {
            row
            for row, length in lengths.items()
            if self.path(row).name in names and self._header_fits(self.path(row), length)
        }

    def sweep(self) -> None:
        """Remove temporary files that a killed run left."""
        for path in self.folder.glob(".hs_*.tmp"):
            path.unlink()

    def free_bytes(self) -> int:
        """Free space of the file system that holds the store, or will."""
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _header_fits(self, path: Path, length: int) -> bool:
        from safetensors import SafetensorError

        try:
            return self.form.fits(path, [length, self.num_aux + 1, self.hidden_size])
        except (SafetensorError, OSError):
            return False

    @contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull(
                f"{self.folder}: the disk is full ({log.human_bytes(self.free_bytes())} free). Every file "
                "that is there is whole: free some space and run the same command again."
            ) from error


def _load(path: Path, form: StoreForm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `store_forms.read`, with `Damaged` for what is wrong with the file."""
    from safetensors import SafetensorError

    try:
        return store_forms.read(path, form)
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged("unreadable", f"{path.name} cannot be read: {error}") from None


def check_ids(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare a file's token ids with the row's.

    Raises:
        Damaged: with the first position that differs.
    """
    import torch

    if torch.equal(found, wanted):
        return
    if len(found) != len(wanted):
        raise Damaged("token_ids", f"{len(found)} token ids where the row has {len(wanted)}")
    position = int((found != wanted).nonzero()[0])
    raise Damaged(
        "token_ids",
        f"token id {int(found[position])} at position {position} where the row has {int(wanted[position])}",
    )
