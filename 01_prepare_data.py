"""Prompts and conversations of any shape -> prompts/, and dataset/ from their own answers on request.

  25,000 prompts for Kimi-K2.5 out of 1.4 million, 500 more held out (answers come from 01b):
    python 01_prepare_data.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  the data sets' own answers as training rows, on 32 cores:
    python 01_prepare_data.py --dataset mlabonne/open-perfectblend --dataset mine.jsonl.zst --answers keep \\
        --verifier moonshotai/Kimi-K2.5 --trust-remote-code --workers 32 --run-dir runs/kept
  seconds on a laptop:
    python 01_prepare_data.py --dataset configs/demo_prompts.jsonl --eval-prompts 40 --run-dir runs/demo
"""

from __future__ import annotations

import argparse
import array
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import atomic_io, cli, conversations, log, manifest, verifier
from common.conversations import Conversation, Dropped
from common.errors import InputError, StageError

if TYPE_CHECKING:
    import numpy as np

    from common.dataset import TrainingRow

_LOG = log.get("01_prepare_data")
_CHUNK_ROWS, _CHUNK_BYTES = 1000, 4_000_000


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    data = parser.add_argument_group("Data")
    data.add_argument(
        "--dataset",
        action="append",
        required=True,
        metavar="PATH|HUB_ID",
        help=".jsonl, .json, .parquet, .csv (.gz, .zst, .bz2, .xz too), a save_to_disk folder or a hub id; "
        "repeatable",
    )
    data.add_argument("--split", default="train", help="split of hub ids and folders (a name)")
    data.add_argument(
        "--source",
        action="append",
        metavar="NAME",
        help="take only rows whose own `source` is this; repeatable; default: all",
    )
    data.add_argument(
        "--eval-prompts",
        type=_count,
        default=200,
        metavar="N",
        help="held-out prompts; each source gives its share, and none of their openings is trained on",
    )
    data.add_argument(
        "--max-samples",
        type=_count,
        metavar="N",
        help="training prompts at most, drawn evenly from all rows; default: all",
    )
    data.add_argument(
        "--answers",
        choices=("drop", "keep"),
        default="drop",
        help="drop: 01b asks the verifier; keep: also dataset/ from the data sets' own answers",
    )
    data.add_argument(
        "--max-length",
        type=_count,
        metavar="TOKENS",
        help="longest training row in tokens with --answers keep; default: the verifier's context",
    )
    data.add_argument("--seed", type=int, default=0, help="of the draws (an integer)")
    data.add_argument(
        "--min-kept",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="fail where a smaller share (0 to 1) of rows or answers can be used; duplicates are usable",
    )
    data.add_argument("--workers", type=_count, default=os.cpu_count(), help="processes; default: one a core")
    verifier.add_arguments(parser)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    keep = args.answers == "keep"
    model = verifier.from_args(args) if keep else None
    sources = [_source(name, args.split) for name in args.dataset]
    deciding = ("dataset", "split", "source", "eval_prompts", "max_samples", "seed")
    config = {key: getattr(args, key) for key in deciding}
    inputs = {source.name: source.fingerprint() for source in sources}
    folder = args.run_dir / "prompts"
    record = manifest.Manifest("01_prepare_data", {**config, "answers": args.answers}, inputs)
    again = {"overwrite": args.overwrite, "accept_stale": args.accept_stale}

    with atomic_io.locked(folder), _spool(args.run_dir) as spool:
        # With --overwrite the old prompts go only when the new ones are known to be good.
        if not args.overwrite and not manifest.begin(folder, record, **again):
            return 0
        try:
            # 1. Each row is normalised or dropped with its reason; texts go to disk, 32 bytes of keys stay.
            scan = _scan(sources, spool, args.workers, keep)
            _require_kept(scan.tally, scan.usable, args.min_kept, "rows")
            # 2. Duplicates, held-out prompts and the sample are chosen by the keys alone.
            fates = _choose(scan, args.source, args.eval_prompts, args.max_samples, args.seed)
            if args.overwrite:
                manifest.begin(folder, record, **again)
            _write_prompts(spool, fates, folder)
            # 3. The training prompts' own answers, in token ids.
            if model:
                record.facts = model.facts()
                _write_dataset(args, model, spool, fates, record)
        except BaseException:
            manifest.abandon(folder)
            raise
        record.counts = _counts(scan, fates)
        record.write(folder)
    _report(scan, fates, folder)
    return 0


# --------------------------------------------------------------------------------------------------------
# Sources: a stream of chunks, in constant memory


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


def _source(name: str, split: str) -> Source:
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


# --------------------------------------------------------------------------------------------------------
# Workers


@contextmanager
def _parallel(workers: int, model: verifier.Verifier | None = None) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield an ordered `map(work, items)` over processes that holds few items at a time; one worker is us."""
    if workers <= 1:
        _start_worker(model, ours=True)
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(model,)) as pool:
        try:
            yield lambda work, items: _bounded_map(pool, work, items, 2 * workers)
        except BrokenProcessPool:
            raise StageError(
                "a worker process was killed, most often for want of memory. Run again with fewer --workers."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _bounded_map(
    pool: ProcessPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], window: int
) -> Iterator[Any]:
    pending: deque[Future[Any]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


_MODEL: verifier.Verifier | None = None


def _start_worker(model: verifier.Verifier | None, ours: bool = False) -> None:
    global _MODEL
    _MODEL = model
    if ours:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@dataclass
class Tally:
    """What was seen and what was dropped why, with the first example of each reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, dropped: Dropped, where: str) -> None:
        """Count a row that is left out; `where` names it for the user."""
        self.dropped[dropped.reason] += 1
        self.examples.setdefault(dropped.reason, f"{where}: {dropped.detail[:200]}".rstrip(": "))

    def add(self, other: Tally) -> None:
        """Take over the counts of a later part."""
        self.read += other.read
        self.dropped += other.dropped
        self.examples = other.examples | self.examples

    def lines(self) -> list[str]:
        """A line for each reason, most frequent first."""
        return [
            f"  {count:>9,}  {reason}  (first: {self.examples[reason]})"
            for reason, count in self.dropped.most_common()
        ]


# --------------------------------------------------------------------------------------------------------
# 1. Normalise


@dataclass
class Normalised:
    """The usable rows of a chunk, in order."""

    prompts: list[bytes] = field(default_factory=list)
    answered: list[bytes] = field(default_factory=list)
    prompt_keys: list[bytes] = field(default_factory=list)
    first_keys: list[bytes] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)


@dataclass
class Scan:
    """All usable rows, 36 bytes each; their texts are on the disk, one line each, in this order."""

    prompt_keys: bytearray = field(default_factory=bytearray)
    first_keys: bytearray = field(default_factory=bytearray)
    source_ids: array.array[int] = field(default_factory=lambda: array.array("I"))
    source_names: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0

    @property
    def usable(self) -> int:
        """Number of rows that could be normalised."""
        return len(self.source_ids)

    def add(self, part: Normalised) -> None:
        """Append the keys of a chunk's rows."""
        self.prompt_keys += b"".join(part.prompt_keys)
        self.first_keys += b"".join(part.first_keys)
        names = self.source_names
        self.source_ids.extend(names.setdefault(name, len(names)) for name in part.sources)
        self.tally.add(part.tally)


def _scan(sources: list[Source], spool: Path, workers: int, keep: bool) -> Scan:
    scan = Scan()
    started = time.monotonic()
    with (
        (spool / "prompts").open("wb") as prompts,
        (spool / "answered").open("wb") as answered,
        _parallel(workers) as parallel,
    ):
        for source in sources:
            shapes: Counter[str] = Counter()
            positions: deque[int] = deque()
            tasks = _tasks(source, keep, positions)
            with log.bar(source.total, unit=source.unit, description=source.label, unit_scale=True) as bar:
                for part in parallel(_normalise, tasks):
                    prompts.writelines(part.prompts)
                    answered.writelines(part.answered)
                    scan.add(part)
                    shapes += part.shapes
                    bar.update(positions.popleft() - bar.n)
                    bar.set_postfix(rows=scan.tally.read, dropped=scan.tally.dropped.total())
            described = ", ".join(f"{count:,} {shape}" for shape, count in shapes.most_common())
            _LOG.info("%s: %s", source.name, described or "no row of a known shape")
    scan.seconds = time.monotonic() - started
    return scan


def _tasks(source: Source, keep: bool, positions: deque[int]) -> Iterator[tuple[Chunk, str, str, bool]]:
    for chunk in source.read():
        positions.append(chunk.position)
        yield chunk, source.name, source.label, keep


def _normalise(task: tuple[Chunk, str, str, bool]) -> Normalised:
    chunk, name, label, keep = task
    part = Normalised()
    for number, row in _rows(chunk, name):
        part.tally.read += 1
        try:
            if not isinstance(row, dict):
                raise Dropped("row_not_an_object", f"found {type(row).__name__}")
            part.shapes[conversations.shape_of(row)] += 1
            whole = conversations.normalise(row, label)
        except Dropped as dropped:
            part.tally.drop(dropped, f"{name}, row {number}")
            continue
        part.prompts.append(_line(whole.prompts()))
        if keep:
            part.answered.append(_line(whole))
        part.prompt_keys.append(conversations.prompt_key(whole))
        part.first_keys.append(conversations.first_prompt_key(whole))
        part.sources.append(whole.source)
    return part


def _rows(chunk: Chunk, name: str) -> Iterator[tuple[int, Any]]:
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


def _line(conversation: Conversation) -> bytes:
    return json.dumps(conversation.to_row(), ensure_ascii=False).encode() + b"\n"


def _require_kept(tally: Tally, usable: int, min_kept: float, what: str) -> None:
    """Stop where too little can be used; what is dropped by choice (duplicates, sampling) does not count."""
    if not tally.read:
        raise InputError(f"the data sets hold no {what}: nothing to prepare")
    share = usable / tally.read
    kept = f"usable {what}: {usable:,} of {tally.read:,} = {share:.1%} (--min-kept {min_kept:.0%})"
    _LOG.info("\n".join([kept, *tally.lines()]))
    if share < min_kept:
        raise StageError("\n".join([f"too little can be used. {kept}. Dropped:", *tally.lines()]))


# --------------------------------------------------------------------------------------------------------
# 2. Choose

_FATES = ("train", "eval", "duplicate", "shares_held_out_opening", "over_max_samples", "other_source")
_TRAIN, _EVAL, _DUPLICATE, _SHARES_OPENING, _OVER_MAX, _OTHER_SOURCE = range(6)


def _choose(
    scan: Scan, wanted: list[str] | None, eval_prompts: int, max_samples: int | None, seed: int
) -> np.ndarray:
    """The fate of each usable row: an index into `_FATES`, [n] uint8.

    Held-out prompts are whole openings (first user messages): one row of an opening is evaluated, the
    others are left out. Draws go by content and seed: a row that joins or leaves does not reshuffle the rest.
    """
    import numpy as np

    prompts = np.frombuffer(scan.prompt_keys, np.dtype(">u8")).reshape(-1, 2)
    openings = np.frombuffer(scan.first_keys, np.dtype(">u8")).reshape(-1, 2)
    sources = np.frombuffer(scan.source_ids, np.uint32)
    asked = np.isin(sources, _source_ids(scan, wanted))
    fates = np.full(len(sources), _OTHER_SOURCE, np.uint8)
    fates[asked] = _choose_among(
        prompts[asked], openings[asked], sources[asked], eval_prompts, max_samples, seed
    )
    return fates


def _choose_among(
    prompts: np.ndarray,
    openings: np.ndarray,
    sources: np.ndarray,
    eval_prompts: int,
    max_samples: int | None,
    seed: int,
) -> np.ndarray:
    import numpy as np

    rows = np.arange(len(sources))
    fates = np.full(len(sources), _TRAIN, np.uint8)

    first_of_opening = _first_equal(openings)
    unique = _first_equal(prompts) == rows
    candidates = rows[first_of_opening == rows]
    if eval_prompts >= len(candidates):
        raise InputError(
            f"--eval-prompts {eval_prompts}: there are {len(candidates)} different openings, and none would "
            "be left to train on. Ask for fewer, or add a --dataset."
        )
    held = candidates[
        _stratified(_ranks(openings[candidates], seed), sources[candidates], eval_prompts, seed)
    ]
    fates[np.isin(first_of_opening, held)] = _SHARES_OPENING
    fates[~unique] = _DUPLICATE
    fates[held] = _EVAL

    training = rows[fates == _TRAIN]
    if max_samples is not None and len(training) > max_samples:
        order = np.argsort(_ranks(prompts[training], seed + 1), kind="stable")
        fates[training[order[max_samples:]]] = _OVER_MAX
    return fates


def _source_ids(scan: Scan, wanted: list[str] | None) -> list[int]:
    unknown = set(wanted or ()) - scan.source_names.keys()
    if unknown:
        found = ", ".join(list(scan.source_names)[:20])
        raise InputError(f"--source {min(unknown)}: no usable row has this source, found: {found}")
    return [scan.source_names[name] for name in wanted or scan.source_names]


def _first_equal(keys: np.ndarray) -> np.ndarray:
    """For each row of `keys` [n, 2] uint64 the index of the first row that equals it, [n] int64."""
    import numpy as np

    order = np.lexsort((keys[:, 1], keys[:, 0]))
    starts = np.ones(len(keys), bool)
    starts[1:] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    first = np.empty(len(keys), np.int64)
    # lexsort is stable: the first of each run of equal keys is the earliest row.
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first


def _ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """A pseudo-random rank of each key, [n] uint64: the same key and seed rank the same everywhere."""
    import numpy as np

    # splitmix64's finaliser; the keys are hashes already, the seed has to reach every bit.
    mixed = keys[:, 0].astype(np.uint64) ^ np.random.default_rng(seed).integers(2**64, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _stratified(ranks: np.ndarray, sources: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of `count` rows, from each source in proportion (largest remainders), lowest ranks first."""
    import numpy as np

    sizes = np.bincount(sources)
    exact = sizes * (count / len(sources))
    quotas = np.floor(exact).astype(np.int64)
    # Among equal remainders the seed decides: else the sources named first would have the places.
    by_remainder = np.lexsort((np.random.default_rng(seed).permutation(len(sizes)), quotas - exact))
    quotas[by_remainder[: count - quotas.sum()]] += 1
    order = np.lexsort((ranks, sources))
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    place = np.arange(len(sources)) - starts[sources[order]]
    return order[place < quotas[sources[order]]]


# --------------------------------------------------------------------------------------------------------
# 3. Write


@contextmanager
def _spool(run_dir: Path) -> Iterator[Path]:
    """A scratch folder on the run's disk; what an earlier crash left in it is removed."""
    folder = run_dir / ".01_prepare_data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_prompts(spool: Path, fates: np.ndarray, folder: Path) -> None:
    with (
        (spool / "prompts").open("rb") as lines,
        atomic_io.replacing(folder / "train.jsonl", "wb") as train,
        atomic_io.replacing(folder / "eval.jsonl", "wb") as held_out,
    ):
        for fate, line in zip(fates.tobytes(), lines, strict=True):
            if fate <= _EVAL:
                (train if fate == _TRAIN else held_out).write(line)


@dataclass
class Rendered:
    """The training rows of some conversations; `tally` counts answers, and conversations without one."""

    rows: list[TrainingRow] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    several: int = 0
    rewritten: int = 0


def _write_dataset(
    args: argparse.Namespace,
    model: verifier.Verifier,
    spool: Path,
    fates: np.ndarray,
    prompts: manifest.Manifest,
) -> None:
    from common import dataset

    folder = args.run_dir / "dataset"
    longest = manifest.settle(
        "longest row (tokens)",
        flag=args.max_length,
        inherited=None,
        default=getattr(model.config, "max_position_embeddings", None) or sys.maxsize,
    )
    config = {**prompts.config, "verifier": model.name, "revision": model.revision, "max_length": longest}
    record = manifest.Manifest("01_prepare_data", config, prompts.inputs, prompts.facts)
    with atomic_io.locked(folder), _parallel(args.workers, replace(model)) as parallel:
        if not manifest.begin(folder, record, overwrite=args.overwrite, accept_stale=args.accept_stale):
            return
        started = time.monotonic()
        total = Rendered()
        tokens: Counter[str] = Counter()
        results = parallel(_render, _answered(spool, fates, longest))
        with log.bar(int((fates == _TRAIN).sum()), unit="conversations", description="tokens") as bar:
            written = dataset.write(folder, _collected(results, total, tokens, args.min_kept, bar))
        record.counts = {
            "read": total.tally.read,
            "written": written,
            "dropped": dict(total.tally.dropped),
            "tokens": tokens["all"],
            "supervised_tokens": tokens["supervised"],
            "conversations_with_rewritten_history": total.rewritten,
        }
        record.write(folder)
    seconds = time.monotonic() - started
    _LOG.info(
        "%s: %s rows, %s tokens, %s supervised; %s tokens / %s = %s tokens/s",
        *(folder, f"{written:,}", f"{tokens['all']:,}", f"{tokens['supervised']:,}"),
        *(f"{tokens['all']:,}", log.human_seconds(seconds), f"{tokens['all'] / seconds:,.0f}"),
    )
    _LOG.info(
        "the template rewrote the history of %s of %s conversations with several answers; each answer has "
        "its own row with the prompt that the model would have seen",
        *(f"{total.rewritten:,}", f"{total.several:,}"),
    )


def _answered(spool: Path, fates: np.ndarray, longest: int) -> Iterator[tuple[list[bytes], int]]:
    lines: list[bytes] = []
    with (spool / "answered").open("rb") as file:
        for fate, line in zip(fates.tobytes(), file, strict=True):
            if fate == _TRAIN:
                lines.append(line)
            if len(lines) == 100:
                yield lines, longest
                lines = []
    if lines:
        yield lines, longest


def _render(task: tuple[list[bytes], int]) -> Rendered:
    from common import chat

    assert _MODEL is not None
    lines, longest = task
    done = Rendered()
    for line in lines:
        whole = Conversation.from_row(json.loads(line))
        done.tally.read += max(1, whole.turns)
        if not whole.turns:
            done.tally.drop(Dropped("no_answer"), whole.id)
        results = list(chat.turns(_MODEL, whole))
        rows = [row for row in results if not isinstance(row, Dropped)]
        done.several += len(rows) > 1
        done.rewritten += chat.history_is_rewritten(rows)
        for turn, row in enumerate(results):
            if isinstance(row, Dropped):
                done.tally.drop(row, f"{whole.id}#{turn}")
            elif row["seq_len"] > longest:
                found = Dropped("too_long", f"{row['seq_len']} tokens, --max-length {longest}")
                done.tally.drop(found, row["id"])
            else:
                done.rows.append(row)
    return done


def _collected(
    results: Iterable[Rendered], total: Rendered, tokens: Counter[str], min_kept: float, bar: Any
) -> Iterator[TrainingRow]:
    written = 0
    for part in results:
        total.tally.add(part.tally)
        total.several += part.several
        total.rewritten += part.rewritten
        for row in part.rows:
            tokens["all"] += row["seq_len"]
            tokens["supervised"] += sum(row["loss_mask"])
            yield row
        written += len(part.rows)
        bar.update(min(100, bar.total - bar.n))
        bar.set_postfix(answers=written, dropped=total.tally.dropped.total(), tokens=tokens["all"])
    # Raised inside the writer's loop, so that a data set with too little in it is never put in place.
    _require_kept(total.tally, written, min_kept, "answers")


def _counts(scan: Scan, fates: np.ndarray) -> dict[str, Any]:
    by_fate = {name: int((fates == code).sum()) for code, name in enumerate(_FATES)}
    train, held_out = by_fate.pop("train"), by_fate.pop("eval")
    chosen = {name: count for name, count in by_fate.items() if count}
    dropped = {**scan.tally.dropped, **chosen}
    written = train + held_out
    return {"read": scan.tally.read, "written": written, "train": train, "eval": held_out, "dropped": dropped}


def _report(scan: Scan, fates: np.ndarray, folder: Path) -> None:
    import numpy as np

    counts = _counts(scan, fates)
    parts = [f"train {counts['train']:,}", f"eval {counts['eval']:,}"]
    parts += [f"{reason} {count:,}" for reason, count in counts["dropped"].items()]
    rate = counts["read"] / max(scan.seconds, 1e-9)
    lines = [f"{folder}: {counts['read']:,} rows = {' + '.join(parts)}"]
    lines += [f"  {'train':>9}  {'eval':>7}  source"]
    sources = np.frombuffer(scan.source_ids, np.uint32)
    size = len(scan.source_names)
    train, held_out = (np.bincount(sources[fates == code], minlength=size) for code in (_TRAIN, _EVAL))
    names = sorted(scan.source_names, key=lambda name: -train[scan.source_names[name]])
    for name in names[:20]:
        index = scan.source_names[name]
        lines.append(f"  {train[index]:>9,}  {held_out[index]:>7,}  {name}")
    lines += [f"  and {len(names) - 20} more sources"] if len(names) > 20 else []
    took = log.human_seconds(scan.seconds)
    lines.append(f"{counts['read']:,} rows / {took} = {rate:,.0f} rows/s")
    _LOG.info("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
