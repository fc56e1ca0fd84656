"""Shard by shard: 03 and 04 alternate over one run folder when the states of all rows do not fit the disk.

04 says in `checkpoints/shards.json` how many shards it has trained; only the states of those may go.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import atomic_io, log
from common.errors import InputError

_RECORD = "shards.json"
_LOG = log.get("shards")


@dataclass(frozen=True)
class Shard:
    """`--shard 2/4`.

    Attributes:
        number: from 1 on.
        count: of all shards.
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """argparse type: `i/n` with 1 <= i <= n."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(
                f"expected i/n, the i-th of n shards such as 2/4; found {text!r}"
            )
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this one."""
        return self.number == self.count

    @property
    def making(self) -> str:
        """What all shards of a run have in common, for manifests."""
        return f"i/{self.count}"

    def is_trained(self, run_dir: Path) -> bool:
        """Whether 04 has finished this shard.

        Raises:
            InputError: it trains in another number of shards, or an earlier shard is due.
        """
        trained = int(self._read(run_dir)["trained"])
        if trained < self.number - 1:
            due = Shard(trained + 1, self.count)
            raise InputError(
                f"--shard {self}: shard {due} is not trained yet, and one run goes through all in order. "
                f"Run `03_capture_hidden.py ... --shard {due}` and `04_train.py ... --shard {due}` first."
            )
        if trained >= self.number:
            _LOG.info("shard %s is trained already", self)
        return trained >= self.number

    def record_trained(self, run_dir: Path, failed: list[int]) -> None:
        """Let it be known that 04 needs no state of this shard any more.

        Args:
            run_dir: of both stages.
            failed: rows without states, of this shard and the ones before.
        """
        record = {"count": self.count, "trained": self.number, "failed": failed}
        atomic_io.write_json(_path(run_dir), record)

    def failed_before(self, run_dir: Path) -> list[int]:
        """Rows of earlier shards that had no states."""
        return list(self._read(run_dir)["failed"]) if self.number > 1 else []

    def require_first(self, flag: str) -> None:
        """Refuse to begin anew in the middle.

        Raises:
            InputError: it is not the first shard.
        """
        if self.number > 1:
            raise InputError(f"{flag} begins the run anew: pass it with --shard 1/{self.count} only")

    def warn_of_earlier_run(self, run_dir: Path) -> None:
        """For 03 --overwrite: 04 would take its shards for trained, and go on with the old drafter."""
        if _path(run_dir).exists():
            _LOG.warning(
                "%s still says what an earlier run has trained: pass --overwrite to "
                "`04_train.py --shard %s` as well",
                *(_path(run_dir), self),
            )

    def _read(self, run_dir: Path) -> dict[str, Any]:
        path = _path(run_dir)
        if not path.exists():
            return {"count": self.count, "trained": 0, "failed": []}
        found = atomic_io.read_json(path)
        if found["count"] != self.count:
            raise InputError(
                f"--shard {self}: {path.parent} trains in {found['count']} shards. Pass --shard "
                f".../{found['count']}, or begin anew with --overwrite in both stages."
            )
        return found


def _path(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / _RECORD
