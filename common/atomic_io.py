"""Files that are whole or absent: write aside and rename, append-only logs, one lock an output folder."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from common import log
from common.errors import InputError, StageError

LOCK_FILES = (".lock", ".lock-holder")
# Half a surrogate pair is no UTF-8; as a backslash escape it is good JSON and comes back as it was.
_SURROGATES = "backslashreplace"
_LOG = log.get("atomic_io")


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path`; on success it is synced and renamed over `path`, else removed.

    Args:
        path: the final file; its folder is made.
        mode: `w` (UTF-8) or `wb`.
    """
    text = {} if "b" in mode else {"encoding": "utf-8", "errors": _SURROGATES}
    with staged(path) as temporary, open(temporary, mode, **text) as file:  # type: ignore[call-overload]
        yield file


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Like `replacing`, for libraries that want a path: yields the temporary neighbour's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # safetensors creates files that no other user, and no container, can read
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    with replacing(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: the file is missing or is not JSON; the message names it.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


class JsonLog:
    """An append-only file of JSON lines; opening it cuts off a last line that a crash tore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._mend_tail()

    def append(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system: it survives SIGKILL of this process."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode(errors=_SURROGATES) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Sync to the disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend_tail(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        tail = b""
        position = end
        while position and b"\n" not in tail:
            position = max(0, position - 65536)
            self._file.seek(position)
            tail = self._file.read(end - position)
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            # No proper part of an object is JSON, so what parses is whole.
            json.loads(last)
        except ValueError:
            self._file.truncate(end - len(last))
        else:
            self._file.write(b"\n")
            self._file.flush()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each row of a JSON-lines file; a torn last line is skipped with a warning, blank ones without.

    Raises:
        InputError: the file is missing, or a complete line is not a JSON object; the message names the line.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    _LOG.warning("%s, line %d is torn (no newline) and is skipped", path, number)
                    return
                raise InputError(f"{path}, line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
            yield row


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the lock vanishes with the process, however it ends.

    Raises:
        StageError: another process holds it; the message says which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, holder = (folder / name for name in LOCK_FILES)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text() if holder.exists() else "another process"
        raise StageError(
            f"{folder} is locked by {who}. Wait for it, or end it, then run this again."
        ) from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}: {' '.join(sys.argv)}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
