"""What `--dataset` may name: JSON lines, JSON, parquet, CSV, saved folders, hub ids; streamed chunk by chunk.

Memory stays constant: nothing is mapped or read ahead, and whoever takes a chunk parses its JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import atomic_io, manifest
from common.errors import InputError, StageError

_CHUNK_ROWS, _CHUNK_BYTES = 1000, 4_000_000


@dataclass(frozen=True)
class Chunk:
    """Some rows of a source.

    Attributes:
        rows: JSON lines, parsed rows, or a table as an Arrow IPC stream.
        first: number of the first row or line, from 1.
        last: number of the last one.
        position: how far the source has been read, in its unit.
    """

    rows: list[Any] | bytes
    first: int
    last: int
    position: int


@dataclass(frozen=True)
class Source:
    """A data set of the command line.

    Attributes:
        name: as it was given.
        label: `source` of rows that have none of their own.
        chunks: opens it.
        total: its size in `unit`, None where unknown.
        unit: `B` (bytes on the disk) or `rows`.
        fingerprint: a short hash of its content.
    """

    name: str
    label: str
    chunks: Callable[[], Iterator[Chunk]]
    total: int | None
    unit: str
    fingerprint: Callable[[], str]

    def read(self) -> Iterator[Chunk]:
        """Yield its chunks; whatever a damaged file makes a reader raise is told with the file's name."""
        after = 0
        try:
            for chunk in self.chunks():
                after = chunk.last
                yield chunk
        except StageError:
            raise
        except Exception as error:
            raise InputError(
                f"--dataset {self.name} cannot be read after row {after}: {type(error).__name__}: {error}. "
                "Download or write the file again; columns of mixed types need JSON lines."
            ) from error


def open_source(name: str, split: str) -> Source:
    """Find out what a `--dataset` is.

    Args:
        name: a file, a folder or a hub id.
        split: which split of a hub id or a folder.

    Raises:
        InputError: there is no such thing, or its kind is not known.
    """
    path = Path(name)
    label = path.name.split(".")[0] if path.is_file() else name.rstrip("/").rpartition("/")[2]
    ending = next((s for s in reversed(path.suffixes) if s not in (".gz", ".zst", ".bz2", ".xz")), "")
    known = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    if not path.exists() and (ending in known or name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise InputError(f"--dataset {name}: no such file or folder (a hub id has the form OWNER/NAME)")
    if path.is_file() and ending not in known:
        raise InputError(f"--dataset {name}: unknown ending; known are {', '.join(known)}, also compressed")
    if path.is_file() and known[ending] == "json":
        size = path.stat().st_size
        return Source(name, label, lambda: _json_chunks(path), size, "B", lambda: manifest.fingerprint(path))
    return _table_source(name, label, path, known.get(ending), split)


def _table_source(name: str, label: str, path: Path, builder: str | None, split: str) -> Source:
    """Parquet, CSV, a `save_to_disk` folder, a folder of files, or a hub id: whatever `datasets` knows."""
    mark = (lambda: manifest.fingerprint(path)) if path.exists() else lambda: _hub_revision(name)
    saved = _saved_files(path, split) if path.is_dir() else []
    files = [str(path)] if builder else saved
    try:
        if builder == "parquet":
            from pyarrow.parquet import read_metadata

            count = read_metadata(path).num_rows
            return Source(name, label, lambda: _parquet_chunks(files), count, "rows", mark)
        import datasets

        if files:
            made = datasets.load_dataset_builder(builder or "arrow", data_files={split: files})
        else:
            made = datasets.load_dataset_builder(name)
        rows = made.as_streaming_dataset(split=split)
    except Exception as error:
        raise InputError(
            f"--dataset {name} (split {split}) cannot be opened: {type(error).__name__}: {error}"
        ) from error
    known = (rows.info.splits or {}).get(split)
    total = known and known.num_examples
    if type(made.config).__name__ == "ParquetConfig":
        parts = list(made.config.data_files[split])
        return Source(name, label, lambda: _parquet_chunks(parts), total, "rows", mark)
    tables = rows.with_format("arrow")
    return Source(
        name, label, lambda: _table_chunks(tables.iter(batch_size=_CHUNK_ROWS)), total, "rows", mark
    )


def _saved_files(folder: Path, split: str) -> list[str]:
    """The Arrow files of a `save_to_disk` folder; [] where it is none. They are streamed, not mapped."""
    if (folder / "dataset_dict.json").exists():
        folder = folder / split
    if not (folder / "state.json").exists():
        return []
    return [
        str(folder / file["filename"]) for file in atomic_io.read_json(folder / "state.json")["_data_files"]
    ]


def _hub_revision(name: str) -> str:
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name).sha or ""


def _parquet_chunks(files: list[str]) -> Iterator[Chunk]:
    """Rows of local or remote files; `datasets` decodes ahead without a bound, 0.7 GB for 300,000 rows."""
    import fsspec
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        for file in files:
            with fsspec.open(file, "rb") as opened:
                table = ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20)
                yield from table.iter_batches(batch_size=_CHUNK_ROWS, use_threads=False)

    return _table_chunks(batches())


def _table_chunks(tables: Iterable[Any]) -> Iterator[Chunk]:
    import pyarrow as pa

    done = 0
    for table in tables:
        first, done = done + 1, done + len(table)
        # A stream holds these rows alone; a pickled slice would carry its whole row group to the worker.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write(table)
        yield Chunk(sink.getvalue().to_pybytes(), first, done, done)


def _json_chunks(path: Path) -> Iterator[Chunk]:
    """JSON lines, or one array of rows; `datasets` would refuse columns of mixed types."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    with path.open("rb") as raw:
        file = io.BufferedReader(compr[infer_compression(str(path))](raw, mode="rb"))
        is_array = file.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        rows: list[Any] = []
        size = first = 0
        for number, row in enumerate(_array_items(file, path) if is_array else file, start=1):
            first = first or number
            rows.append(row)
            size += len(row) if isinstance(row, bytes) else _CHUNK_BYTES // _CHUNK_ROWS
            if len(rows) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
                yield Chunk(rows, first, number, raw.tell())
                rows, size, first = [], 0, 0
        if rows:
            yield Chunk(rows, first, number, raw.tell())


def _array_items(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """The items of one JSON array, each parsed when enough of the file has been read."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    decoder = json.JSONDecoder()
    buffer, count = text.read(1 << 20).lstrip()[1:], 0
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            # Else the wrapper would close the file, whose position the caller still asks for.
            text.detach()
            return
        try:
            item, end = decoder.raw_decode(buffer)
        except json.JSONDecodeError as error:
            more = text.read(max(1 << 20, len(buffer)))
            if not more or len(buffer) > 1 << 28:
                raise InputError(f"{path}, row {count + 1} of the array is not valid JSON: {error}") from None
            buffer += more
            continue
        count += 1
        yield item
        buffer = buffer[end:]


def rows_of(chunk: Chunk, name: str) -> Iterator[tuple[int, Any]]:
    """Yield each row of a chunk with its number.

    Args:
        chunk: of `Source.read`.
        name: the source's name, for the error.

    Raises:
        InputError: a line is not JSON.
    """
    rows = chunk.rows
    if isinstance(rows, bytes):
        import pyarrow as pa

        # Arrow fills the keys that a row lacks with nulls, in tool declarations too.
        rows = [_without_nulls(row) for row in pa.ipc.open_stream(rows).read_all().to_pylist()]
    for number, row in enumerate(rows, start=chunk.first):
        if not isinstance(row, bytes):
            yield number, row
        elif row.strip():
            try:
                yield number, json.loads(row)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"--dataset {name}, line {number} is not valid JSON: {error}. A download that broke off "
                    "looks like this: get the file again, or remove the line."
                ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
