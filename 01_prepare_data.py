"""Prompts and conversations of any shape -> prompts/, and dataset/ from their own answers on request.

  25,000 prompts for Kimi-K2.5 out of 1.4 million, 500 more held out (answers come from 01b):
    python 01_prepare_data.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  the data sets' own answers as training rows, on 32 cores:
    python 01_prepare_data.py --dataset mlabonne/open-perfectblend --dataset mine.jsonl.zst --answers keep \\
        --verifier moonshotai/Kimi-K2.5 --trust-remote-code --workers 32 --run-dir runs/kept
  seconds on a laptop:
    python 01_prepare_data.py --dataset configs/demo_prompts.jsonl --eval-prompts 40 --run-dir runs/laptop
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import atomic_io, cli, conversations, log, manifest, split, verifier, workers
from common.conversations import Conversation, Dropped
from common.errors import InputError, StageError
from common.sources import Chunk, Source, open_source, rows_of
from common.split import Keys

if TYPE_CHECKING:
    import numpy as np

    from common.dataset import TrainingRow

STAGE = Path(__file__).stem
_LOG = log.get(STAGE)
_TOKENIZERS = ("transformers.models.auto.tokenization_auto",)  # it imports PyTorch


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
        type=whole_number,
        default=200,
        metavar="N",
        help="held-out prompts; each source gives its share, and none of their openings is trained on",
    )
    data.add_argument(
        "--max-samples",
        type=whole_number,
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
        type=cli.positive,
        metavar="TOKENS",
        help="longest training row in tokens with --answers keep; default: the verifier's context",
    )
    data.add_argument("--seed", type=int, default=0, help="of the draws (an integer)")
    data.add_argument(
        "--min-kept",
        type=cli.share,
        default=0.5,
        metavar="SHARE",
        help="fail where a smaller share (0 to 1) of rows or answers can be used; duplicates are usable",
    )
    data.add_argument(
        "--workers", type=cli.positive, default=os.cpu_count(), help="processes; default: one a core"
    )
    verifier.add_arguments(parser)
    return parser


def whole_number(text: str) -> int:
    """As `cli.positive`, but none is a number too."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    model = verifier.from_args(args) if args.answers == "keep" else None
    sources = [open_source(name, args.split) for name in args.dataset]
    records = _records(args, model, sources)
    with ExitStack() as held:
        for folder in records:
            held.enter_context(atomic_io.locked(folder))
        spool = held.enter_context(_spool(args.run_dir))
        try:
            if not args.overwrite and not _begin(args, records):
                return 0
            # 1. Each row is normalised or dropped with its reason; texts go to disk, 36 bytes of keys stay.
            scan = _scan(sources, spool, args.workers, model is not None)
            _require_kept(scan.tally, len(scan.keys), args.min_kept, "rows")
            # 2. Duplicates, held-out prompts and the sample are chosen by the keys alone.
            fates = split.choose(scan.keys, args.source, args.eval_prompts, args.max_samples, args.seed)
            _write_prompts(spool, fates)
            records[args.run_dir / "prompts"].counts = _counts(scan, fates)
            # 3. The training prompts' own answers, in token ids.
            if model:
                _write_dataset(args, model, spool, fates, records[args.run_dir / "dataset"])
            # 4. With --overwrite the old output goes now, when nothing of the new can fail any more.
            if args.overwrite:
                _begin(args, records)
            _put_in_place(spool, records)
        except BaseException:
            for folder in records:
                manifest.abandon(folder)
            raise
    _report(scan, fates, args.run_dir / "prompts")
    return 0


def _records(
    args: argparse.Namespace, model: verifier.Verifier | None, sources: list[Source]
) -> dict[Path, manifest.Manifest]:
    """The manifest of each folder that is asked for, without counts yet; a wrong verifier shows here."""
    deciding = ("dataset", "split", "source", "eval_prompts", "max_samples", "seed", "answers")
    config = {key: getattr(args, key) for key in deciding}
    inputs = {source.name: source.fingerprint() for source in sources}
    facts = model.facts() if model else {}
    records = {args.run_dir / "prompts": manifest.Manifest(STAGE, config, inputs, facts)}
    if model:
        longest = manifest.settle(
            "longest row (tokens)",
            flag=args.max_length,
            inherited=None,
            default=getattr(model.config, "max_position_embeddings", None) or sys.maxsize,
        )
        config = {**config, "verifier": model.name, "revision": model.revision, "max_length": longest}
        records[args.run_dir / "dataset"] = manifest.Manifest(STAGE, config, inputs, facts)
    return records


def _begin(args: argparse.Namespace, records: dict[Path, manifest.Manifest]) -> bool:
    """Whether any folder is still to be made."""
    again = {"overwrite": args.overwrite, "accept_stale": args.accept_stale}
    working = [manifest.begin(folder, record, **again) for folder, record in records.items()]
    return any(working)


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
    """All rows were read: the usable ones' texts are on the disk, one line each, in the order of `keys`."""

    keys: Keys = field(default_factory=Keys)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0


def _scan(sources: list[Source], spool: Path, count: int, keep: bool) -> Scan:
    scan = Scan()
    started = time.monotonic()
    with (
        (spool / "prompts").open("wb") as prompts,
        (spool / "answered").open("wb") as answered,
        workers.parallel(count, preload=_TOKENIZERS if keep else ()) as parallel,
    ):
        for source in sources:
            shapes: Counter[str] = Counter()
            positions: deque[int] = deque()
            tasks = _tasks(source, keep, positions)
            with log.bar(source.total, unit=source.unit, description=source.label, unit_scale=True) as bar:
                for part in parallel(_normalise, tasks):
                    prompts.writelines(part.prompts)
                    answered.writelines(part.answered)
                    scan.keys.add(part.prompt_keys, part.first_keys, part.sources)
                    scan.tally.add(part.tally)
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
    for number, row in rows_of(chunk, name):
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
# 3. Write (2, the choice, is common/split.py)


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


def _write_prompts(spool: Path, fates: np.ndarray) -> None:
    with (
        (spool / "prompts").open("rb") as lines,
        atomic_io.replacing(spool / "new" / "prompts" / "train.jsonl", "wb") as train,
        atomic_io.replacing(spool / "new" / "prompts" / "eval.jsonl", "wb") as held_out,
    ):
        for fate, line in zip(fates.tobytes(), lines, strict=True):
            if fate <= split.EVAL:
                (train if fate == split.TRAIN else held_out).write(line)


def _put_in_place(spool: Path, records: dict[Path, manifest.Manifest]) -> None:
    from common import dataset

    for folder, record in reversed(records.items()):
        dataset.move(spool / "new" / folder.name, folder)
        record.write(folder)


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
    record: manifest.Manifest,
) -> None:
    from common import dataset

    started = time.monotonic()
    total = Rendered()
    tokens: Counter[str] = Counter()
    render = functools.partial(_render, replace(model), record.config["max_length"])
    count = int((fates == split.TRAIN).sum())
    with (
        workers.parallel(args.workers, preload=_TOKENIZERS) as parallel,
        log.bar(count, unit="conversations", description="tokens") as bar,
    ):
        results = parallel(render, _answered(spool, fates))
        rows = _collected(results, total, tokens, args.min_kept, bar)
        written = dataset.write(spool / "new" / "dataset", rows)
    record.counts = {
        "read": total.tally.read,
        "written": written,
        "dropped": dict(total.tally.dropped),
        "tokens": tokens["all"],
        "supervised_tokens": tokens["supervised"],
        "conversations_with_rewritten_history": total.rewritten,
    }
    seconds = time.monotonic() - started
    _LOG.info(
        "%s: %s rows, %s tokens, %s supervised; %s tokens / %s = %s tokens/s",
        *(args.run_dir / "dataset", f"{written:,}", f"{tokens['all']:,}", f"{tokens['supervised']:,}"),
        *(f"{tokens['all']:,}", log.human_seconds(seconds), f"{tokens['all'] / seconds:,.0f}"),
    )
    _LOG.info(
        "the template rewrote the history of %s of %s conversations with several answers; each answer has "
        "its own row with the prompt that the model would have seen",
        *(f"{total.rewritten:,}", f"{total.several:,}"),
    )


def _answered(spool: Path, fates: np.ndarray) -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    with (spool / "answered").open("rb") as file:
        for fate, line in zip(fates.tobytes(), file, strict=True):
            if fate == split.TRAIN:
                lines.append(line)
            if len(lines) == 100:
                yield lines
                lines = []
    if lines:
        yield lines


@functools.cache
def _resident(model: verifier.Verifier) -> verifier.Verifier:
    """A worker's first copy of the verifier, whose tokenizer is loaded once."""
    return model


def _render(model: verifier.Verifier, longest: int, lines: list[bytes]) -> Rendered:
    from common import chat

    model = _resident(model)
    done = Rendered()
    for line in lines:
        whole = Conversation.from_row(json.loads(line))
        done.tally.read += max(1, whole.turns)
        if not whole.turns:
            done.tally.drop(Dropped("no_answer"), whole.id)
        results = list(chat.turns(model, whole))
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
    by_fate = {name: int((fates == code).sum()) for code, name in enumerate(split.FATES)}
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
    sources = np.frombuffer(scan.keys.source_ids, np.uint32)
    size = len(scan.keys.source_names)
    train, held_out = (
        np.bincount(sources[fates == code], minlength=size) for code in (split.TRAIN, split.EVAL)
    )
    names = sorted(scan.keys.source_names, key=lambda name: -train[scan.keys.source_names[name]])
    for name in names[:20]:
        index = scan.keys.source_names[name]
        lines.append(f"  {train[index]:>9,}  {held_out[index]:>7,}  {name}")
    lines += [f"  and {len(names) - 20} more sources"] if len(names) > 20 else []
    took = log.human_seconds(scan.seconds)
    lines.append(f"{counts['read']:,} rows / {took} = {rate:,.0f} rows/s")
    _LOG.info("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
