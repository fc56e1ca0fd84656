"""Which rows of a data set, and which parts of them, are captured."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli, log, manifest
from common.capture import Rows
from common.errors import InputError
from common.shards import Shard

if TYPE_CHECKING:
    from common.hidden_states import HiddenStateStore

_LOG = log.get("capture_rows")
_STAGE = "03_capture_hidden"
_BLOCK_BYTES = 4096  # a file's last block
_USABLE = 0.98  # of the room, for --fit-disk: files on their way and logs want some


def add_arguments(rows: argparse._ArgumentGroup) -> None:
    """The flags that leave something out."""
    flag = argparse.BooleanOptionalAction
    rows.add_argument(
        "--trim",
        action=flag,
        default=False,
        help="leave out what training never reads: rows without a supervised token, and tokens after the "
        "last one; what is kept becomes hidden_states/rows/, the data set that 04 then reads",
    )
    rows.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="with --trim: keep only so many tokens before the first supervised one; may cost acceptance",
    )
    rows.add_argument(
        "--fit-disk",
        action=flag,
        default=False,
        help="where the states do not fit the disk or --max-disk, take as many conversations as fit",
    )
    rows.add_argument(
        "--shard",
        type=Shard.parse,
        metavar="I/N",
        help="capture the held-out rows and the I-th of N parts of the others; states of parts that "
        "04 --shard has trained are deleted first",
    )
    rows.add_argument(
        "--eval-ratio",
        type=cli.share,
        default=0.05,
        metavar="SHARE",
        help="with --shard: rows that 04 holds out, from the end; the same as its --eval-ratio",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        InputError: they do.
    """
    from common.trim import SHORTEST_CONTEXT

    if args.probe and (args.trim or args.fit_disk):
        raise InputError("--probe looks at a few whole rows: leave out --trim and --fit-disk")
    if args.shard and (args.probe or args.fit_disk):
        raise InputError("--shard takes all rows, part by part: leave out --probe and --fit-disk")
    if args.shard and args.overwrite:
        args.shard.require_first("--overwrite")
    if args.context is None:
        return
    if not args.trim:
        raise InputError("--context says how much --trim keeps: pass --trim as well")
    if args.context < SHORTEST_CONTEXT:
        raise InputError(
            f"--context {args.context}: must be at least {SHORTEST_CONTEXT}, so that a chain of draft "
            "tokens never reaches into the supervised ones of the row that is packed behind"
        )


def config(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the rows. None where a flag is not given, as in manifests from before there was one."""
    return {"trim": args.trim or None, "context": args.context, "fit_disk": args.fit_disk or None}


def shard_config(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the shards, the same for all of them."""
    shard = args.shard
    return {"shard": shard and shard.making, "eval_ratio": args.eval_ratio if shard else None}


@dataclass(frozen=True)
class Choice:
    """The rows to capture, and what becomes of the others.

    Attributes:
        args: the flags.
        full: all rows of the data set.
        rows: what is captured.
        elsewhere: with `--shard`, rows that are not: reason -> how many.
        lost: held-out rows that the first shard could not capture; they stay out, so that all shards are
            measured on the same.
        record: of `hidden_states/rows/`, where that is made; its counts say what was left out.
    """

    args: argparse.Namespace
    full: Rows
    rows: Rows
    record: manifest.Manifest | None
    elsewhere: dict[str, int] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()

    @classmethod
    def settle(cls, args: argparse.Namespace, source: Path) -> Choice:
        """Read the data set's outline; what an earlier run of the same making chose is chosen again.

        Args:
            args: the flags.
            source: the data set's folder.

        Raises:
            InputError: it is absent, or nothing is left of it.
        """
        choice = cls._trimmed(args, source)
        return choice._sharded() if args.shard else choice

    @classmethod
    def _trimmed(cls, args: argparse.Namespace, source: Path) -> Choice:
        from common import trim

        full = Rows.load(source)
        if not (args.trim or args.fit_disk):
            return cls(args, full, full.only(list(full.lengths)[: args.probe]), None)
        inputs = {"dataset": manifest.fingerprint(source)}
        record = manifest.Manifest(stage=_STAGE, config=config(args), inputs=inputs)
        folder = args.run_dir / "hidden_states" / trim.FOLDER
        earlier = None if args.overwrite else trim.recorded(folder, record, accept_stale=args.accept_stale)
        if earlier is not None:
            return cls(args, full, full.of(earlier), manifest.read(folder, f"{_STAGE}.py"))
        lengths = list(full.lengths.values())
        kept = trim.Kept.supervised(full.data, args.context) if args.trim else trim.Kept.whole(lengths)
        if not len(kept):
            raise InputError(f"{source} has no supervised token: there is nothing to train on")
        record.counts = kept.counts(lengths)
        return cls(args, full, full.of(kept), record)

    def _sharded(self) -> Choice:
        """The held-out rows, and those of the shard."""
        from common import partition

        rows, shard = self.rows, self.args.shard
        boundary = rows.held_out_from(self.args.eval_ratio)
        sizes = list(rows.lengths.values())[:boundary]
        parts = [part.tolist() for part in partition.into_shards(rows.ids[:boundary], sizes, shard.count)]
        lost = frozenset(row for row in shard.failed_before(self.args.run_dir) if row >= boundary)
        mine = {*parts[shard.number - 1], *range(boundary, len(rows))} - lost
        elsewhere = {
            "trained": sum(map(len, parts[: shard.number - 1])),
            "later_shards": sum(map(len, parts[shard.number :])),
        }
        return replace(self, rows=rows.only(sorted(mine)), elsewhere=elsewhere, lost=lost)

    @property
    def facts(self) -> dict[str, Any]:
        """What training must know: the data set that belongs to the states, if it is not `dataset/`."""
        from common.trim import FOLDER

        shard = self.args.shard
        return ({} if self.record is None else {"rows": FOLDER, "context": self.args.context}) | (
            {"shards": shard.count, "eval_ratio": self.args.eval_ratio} if shard else {}
        )

    def fitted(self, store: HiddenStateStore) -> Choice:
        """With `--fit-disk`, as many conversations as there is room for.

        Raises:
            InputError: there is room for none.
        """
        from common import partition

        args, record, parts = self.args, self.record, self.rows.parts
        if not args.fit_disk or record is None or parts is None:
            return self
        if record.created:
            _LOG.info("fit disk: the %d rows that were chosen when this set was begun", len(self.rows))
            return self
        sizes = [store.bytes_of({row: length}) + _BLOCK_BYTES for row, length in self.rows.lengths.items()]
        # What --overwrite replaces goes before most of the new is written.
        old = sum(path.stat().st_size for path in store.folder.glob("hs_*")) if args.overwrite else 0
        room = float(store.free_bytes() + old + manifest.bytes_to_replace(store.folder))
        if args.max_disk is not None:
            room = min(room, args.max_disk * 1e9)
        which = partition.that_fit(self.rows.ids, sizes, _USABLE * room)
        if not len(which):
            raise InputError(
                f"{store.folder}: there is room for {log.human_bytes(room)}, and not one conversation fits. "
                "Free some space, or put --run-dir on a larger file system."
            )
        _LOG.info(
            "fit disk: %d of %d rows, %s of %s, fit into %.0f %% of %s",
            *(len(which), len(sizes), log.human_bytes(sum(sizes[row] for row in which))),
            *(log.human_bytes(sum(sizes)), 100 * _USABLE, log.human_bytes(room)),
        )
        counts = parts.fitted_counts(record.counts, which)
        return replace(self, rows=self.full.of(parts.select(which)), record=replace(record, counts=counts))

    def describe(self, store: HiddenStateStore) -> None:
        """Show what is left out, with its formula."""
        if self.record is None:
            return
        tokens = self.record.counts["tokens"]
        parts = {name.replace("_", " "): count for name, count in tokens.items() if count and name != "read"}
        _LOG.info(
            "tokens: %s = %s; left out: %s of states",
            log.human_count(tokens["read"]),
            " + ".join(f"{log.human_count(count)} {name}" for name, count in parts.items()),
            log.human_bytes((tokens["read"] - tokens["written"]) * store.bytes_per_token),
        )

    def outdated(self, store: HiddenStateStore) -> list[Path]:
        """With `--shard`, files of other shards; `Shard.is_trained` has made sure that these are trained."""
        wanted = {store.path(row) for row in self.rows.lengths}
        return [path for path in store.folder.glob("hs_*") if path not in wanted] if self.args.shard else []

    def write(self, folder: Path) -> None:
        """Put the data set of what is kept beside its states, unless it is there.

        Args:
            folder: `hidden_states/`.
        """
        from common import trim

        if self.record is not None and self.rows.parts is not None and not self.record.created:
            trim.write(folder / trim.FOLDER, self.full.data, self.rows.parts, self.record)

    def forget(self, folder: Path) -> None:
        """Let a run that follows one without any states choose anew: the disk may have more room then.

        Args:
            folder: `hidden_states/`, after `manifest.abandon`.
        """
        from common import trim

        if self.record is not None and not any(folder.glob("hs_*")):
            shutil.rmtree(folder / trim.FOLDER, ignore_errors=True)

    def account(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The counts of the capture, and where the other rows of the data set went."""
        dropped = dict(self.elsewhere)
        lost = {str(row): "held out, and failed with the first shard" for row in self.lost}
        counts = counts | {
            "failed": counts["failed"] + len(lost),
            "failures": counts["failures"] | lost,
        }
        if self.record is not None:
            dropped |= self.record.counts["dropped"]
            counts = counts | {"trimmed": self.record.counts["tokens"]}
        if self.args.shard:
            counts = counts | {"shard": str(self.args.shard)}
        return counts | {"read": len(self.full), "dropped": dropped} if dropped else counts
