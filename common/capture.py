"""Filling a store of hidden states from a data set: order, first rows, failures, verification."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import dataset, log
from common.content_check import ContentCheck, Doubtful
from common.errors import StageError
from common.hidden_states import Backend, CaptureRow, Damaged, HiddenStateStore, OnlyLookedAt, check_ids

if TYPE_CHECKING:
    import datasets
    import torch
    from tqdm import tqdm

    from common.trim import Kept

_LOG = log.get("capture")
_PROBE_ROWS = 8
_PROBE_TOKENS = 16
_HOPELESS = 10  # failures that stop a run before its end, beside twice the share that is allowed
_DOUBTED = 8  # rows in doubt that the verifier is asked about together
_UNPROVEN = 500  # rows after which it is asked about the first ones again
_WITNESSES = 2
_RATE_DRIFT = 0.1


@dataclass(frozen=True)
class Rows:
    """A data set's rows, loaded one by one.

    Attributes:
        data: the full data set.
        lengths: row -> T, the tokens whose states are stored.
        parts: where only parts of the data set are wanted; rows then are numbered as in it.
    """

    data: datasets.Dataset
    lengths: dict[int, int]
    parts: Kept | None = None

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """Open a data set and learn its rows' lengths.

        Raises:
            InputError: the folder is absent or damaged.
        """
        data = dataset.load(folder)
        plain = data.with_format(None)
        lengths = plain["seq_len"] if "seq_len" in data.column_names else map(len, plain["input_ids"])
        return cls(data, dict(enumerate(lengths)))

    def of(self, parts: Kept) -> Rows:
        """These parts of the data set only."""
        return Rows(self.data, dict(enumerate(parts.lengths.tolist())), parts)

    def only(self, indices: Iterable[int]) -> Rows:
        """Some of the rows, under their numbers."""
        return replace(self, lengths={index: self.lengths[index] for index in indices})

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> CaptureRow:
        parts = self.parts
        row = self.data[index if parts is None else int(parts.rows[index])]
        start = 0 if parts is None else int(parts.start[index])
        stop = start + self.lengths[index]
        return CaptureRow(index, row["input_ids"][:stop].long(), row["loss_mask"][:stop], start)

    @property
    def ids(self) -> list[str]:
        """`prompt#turn` of each row of the numbering, whether it is among `lengths` or not."""
        ids = dataset.ids(self.data)
        return ids if self.parts is None else [ids[row] for row in self.parts.rows]

    def held_out_from(self, eval_ratio: float) -> int:
        """The first row that 04 holds out with this `--eval-ratio`."""
        from common import partition

        return partition.held_out_from(self.ids, eval_ratio)

    def sent(self, index: int) -> int:
        """Tokens that are computed: all up to the last one that is kept."""
        return self.lengths[index] + (0 if self.parts is None else int(self.parts.start[index]))

    @property
    def longest(self) -> int:
        """Tokens of the longest row as it is computed."""
        return max(self.sent(index) for index in self.lengths)

    def tokens(self, indices: Iterable[int]) -> int:
        """Tokens that are computed for these rows together."""
        return sum(self.sent(index) for index in indices)

    def longest_first(self, indices: Iterable[int]) -> Iterator[CaptureRow]:
        """Batches of like rows, and what does not fit fails at once instead of at the end."""
        return (self[index] for index in sorted(indices, key=lambda i: (-self.sent(i), i)))

    def to_judge_by(self, indices: Iterable[int]) -> list[int]:
        """The shortest rows that have enough tokens to tell right states from wrong ones."""
        enough = [index for index in indices if self.lengths[index] >= _PROBE_TOKENS]
        return sorted(enough, key=lambda i: (self.sent(i), i))[:_PROBE_ROWS]


@dataclass
class Tally:
    """Supervised tokens that the state before them predicts; several threads add to it."""

    hits: int = 0
    looked_at: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, hits: int, looked_at: int) -> None:
        """Count one row."""
        with self._lock:
            self.hits += hits
            self.looked_at += looked_at

    @property
    def rate(self) -> float:
        """Share of the tokens looked at; 0 where none was."""
        return self.hits / self.looked_at if self.looked_at else 0.0

    def __str__(self) -> str:
        return f"{self.hits} of {self.looked_at} supervised tokens are predicted ({self.rate:.1%})"


class Capture:
    """Fills the store: the first rows are compared with the verifier's own words before the rest is sent.

    Each of the rest is glanced at. Rows in doubt are computed once more and compared as the first ones were,
    and with them, and after every 500 rows, some of the first ones again. Where those are not right any more,
    neither is the server: what it gave since they were is thrown away.

    Args:
        rows: the data set.
        store: what is filled.
        content: the check of what states predict, None to leave it out.
        max_failure_rate: share of all rows that may be missing in the end.
    """

    def __init__(
        self, rows: Rows, store: HiddenStateStore, content: ContentCheck | None, max_failure_rate: float
    ) -> None:
        self._rows, self._store, self._content = rows, store, content
        self._max_failure_rate = max_failure_rate
        self._failed: dict[int, str] = {}
        self._doubted: list[int] = []
        self._confirmed = 0
        self._unproven: list[int] = []
        self._ask_at = _UNPROVEN
        self._agreements: list[float] = []
        self._tally = Tally()

    async def run(
        self,
        entering: AbstractAsyncContextManager[Backend],
        todo: list[int],
        proven: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture `todo`; rows that fail are tried once more at the end.

        Args:
            entering: yields what computes the states.
            todo: indices of rows.
            proven: called when the server answers and the first rows are right.

        Raises:
            StageError: a first row contradicts the verifier, now or later, too many fail, or no more can be
                written.
        """
        tokens = self._rows.tokens(todo)
        # What is loaded by now stays: looking through PyTorch's objects again and again took 3 % of the time.
        gc.freeze()
        with log.bar(tokens, unit="tokens", description="capture", unit_scale=True) as bar:
            async with entering as backend:
                begun = time.monotonic()
                # A few rows that failed before, and may fail again, are no reason to stop.
                few = len(todo) <= min(_PROBE_ROWS, self._max_failure_rate * len(self._rows))
                probe = [] if few or self._content is None else self._rows.to_judge_by(todo)
                if probe:
                    await self._probe(backend, probe, bar)
                proven()
                await self._pass(backend, set(todo) - set(probe), bar)
                if self._failed:
                    _LOG.warning("%d rows failed and are tried once more", len(self._failed))
                    again, self._failed = set(self._failed), {}
                    await self._pass(backend, again, bar)
                if self._confirmed:
                    _LOG.info("content: the verifier confirmed %d rows that were in doubt", self._confirmed)
        seconds = time.monotonic() - begun
        _LOG.info(
            "captured: %s tokens in %s = %.0f tokens/s; %s",
            *(log.human_count(tokens), log.human_seconds(seconds), tokens / seconds, self._tally),
        )

    def counts(self) -> dict[str, Any]:
        """What is in the store, for the manifest.

        Raises:
            StageError: more rows are missing than `max_failure_rate` allows.
        """
        there = self._store.done(self._rows.lengths)
        missing = {i: self._failed.get(i, "not captured") for i in self._rows.lengths if i not in there}
        if len(missing) > self._max_failure_rate * len(self._rows):
            raise StageError(self._too_many(missing))
        for index, why in missing.items():
            _LOG.warning("row %d is left out: %s", index, why)
        return {
            "read": len(self._rows),
            "written": len(there),
            "failed": len(missing),
            "failures": {str(index): why for index, why in missing.items()},
            "tokens": sum(self._rows.lengths[index] for index in there),
            "bytes": sum(self._store.path(index).stat().st_size for index in there),
            "content": {
                "hits": self._tally.hits,
                "looked_at": self._tally.looked_at,
                "confirmed": self._confirmed,
            },
        }

    async def _probe(self, backend: Backend, probe: list[int], bar: tqdm) -> None:
        async for row, error in backend.capture(self._rows.longest_first(probe), self._prove, predict=True):
            if error is not None:
                raise StageError(f"one of the first rows does not pass; the rest was not sent. {error}")
            bar.update(len(row.token_ids))
        _LOG.info(
            "content: the first %d rows' last states give the token that the verifier itself ranks first at "
            "%.1f %% of the positions; %s",
            *(len(probe), 100 * statistics.fmean(self._agreements), self._tally),
        )

    async def _pass(self, backend: Backend, todo: set[int], bar: tqdm) -> None:
        check = None if self._content is None else self._glance
        async for row, error in backend.capture(self._rows.longest_first(todo), check):
            if error is None:
                bar.update(len(row.token_ids))
                self._unproven.append(row.index)
            elif isinstance(error, Doubtful):
                _LOG.debug("%s", error)
                self._doubted.append(row.index)
            else:
                self._fail(row, error)
            if len(self._doubted) >= _DOUBTED or len(self._unproven) >= self._ask_at:
                await self._settle(backend, bar)
        if self._doubted or self._unproven:
            await self._settle(backend, bar)

    async def _settle(self, backend: Backend, bar: tqdm) -> None:
        """Let the verifier say whether the rows in doubt are right, and whether the first ones still are."""
        doubted, self._doubted = set(self._doubted), []
        content = self._content
        if content is None:
            return
        witnesses = set(self._rows.to_judge_by(self._rows.lengths)[:_WITNESSES]) - doubted

        def check(row: CaptureRow, states: torch.Tensor, said: torch.Tensor) -> None:
            if row.index in doubted:
                self._prove(row, states, said)
                return
            content.compare(row, states, said)
            raise OnlyLookedAt(row)

        silent = set(witnesses)
        asked = self._rows.longest_first(doubted | witnesses)
        async for row, error in backend.capture(asked, check, predict=True):
            if row.index in doubted:
                if error is not None:
                    self._fail(row, error)
                else:
                    bar.update(len(row.token_ids))
                    self._confirmed += 1
            elif isinstance(error, OnlyLookedAt):
                silent.discard(row.index)
            elif isinstance(error, Damaged):
                raise StageError(self._take_back(error))
        if not silent:
            self._unproven = []
        self._ask_at = len(self._unproven) + _UNPROVEN

    def _take_back(self, error: Damaged) -> str:
        for index in self._unproven:
            self._store.path(index).unlink(missing_ok=True)
        return (
            "the server's states were right and are not any more. Was it started again with other flags or "
            f"another model? {error} The {len(self._unproven)} rows that were stored since the comparison "
            "before are deleted, earlier ones are kept. Mend the server and run the same command again."
        )

    def _fail(self, row: CaptureRow, error: StageError) -> None:
        _LOG.debug("row %d: %s", row.index, error)
        self._failed[row.index] = f"{getattr(error, 'reason', type(error).__name__)}: {error}"
        if len(self._failed) > _HOPELESS + 2 * self._max_failure_rate * len(self._rows):
            raise StageError(self._too_many(self._failed))

    def _prove(self, row: CaptureRow, states: torch.Tensor, said: torch.Tensor) -> None:
        assert self._content is not None
        self._agreements.append(self._content.compare(row, states, said))
        self._tally.add(*self._content.hits(row, states))

    def _glance(self, row: CaptureRow, states: torch.Tensor, said: torch.Tensor) -> None:
        assert self._content is not None
        self._tally.add(*self._content.glance(row, states, said, self._tally.rate))

    def _too_many(self, missing: dict[int, str]) -> str:
        reasons = Counter(why.split(":")[0] for why in missing.values()).most_common()
        index, why = next(iter(missing.items()))
        return (
            f"{len(missing)} of {len(self._rows)} rows failed "
            f"({', '.join(f'{reason} {count}' for reason, count in reasons)}), more than --max-failure-rate "
            f"{self._max_failure_rate} allows. The first is row {index}: {why}. What passed is kept: run the "
            "same command again to try these rows once more."
        )


def verify(rows: Rows, store: HiddenStateStore, content: ContentCheck | None, counts: dict[str, Any]) -> None:
    """Read every file again and check what the files alone can show.

    Args:
        rows: the data set.
        store: finished.
        content: the check of what states predict, None to leave it out.
        counts: of the store's manifest.

    Raises:
        StageError: a file fails, or the content is not what was captured.
    """
    begun = time.monotonic()
    wanted = [index for index in rows.lengths if str(index) not in counts["failures"]]
    tally, bad = Tally(), {}

    def check(index: int) -> tuple[int, Damaged | None]:
        row = rows[index].kept
        try:
            token_ids, states = store.read(index)
            check_ids(token_ids, row.token_ids)
            store.check_form(token_ids, states)
        except Damaged as error:
            return index, error
        if content is not None:
            tally.add(*content.hits(row, states))
        return index, None

    with ThreadPoolExecutor() as threads, log.bar(len(wanted), unit="files", description="verify") as bar:
        for index, error in threads.map(check, wanted):
            bar.update()
            if error is not None:
                bad[index] = error
    seconds = time.monotonic() - begun
    _LOG.info(
        "verified: %d files, %s in %s = %s/s, %d damaged; %s",
        *(len(wanted), log.human_bytes(counts["bytes"]), log.human_seconds(seconds)),
        *(log.human_bytes(counts["bytes"] / seconds), len(bad), tally),
    )
    if bad:
        index, first = next(iter(bad.items()))
        names = " ".join(store.path(index).name for index in list(bad)[:10])
        raise StageError(
            f"{len(bad)} of {len(wanted)} files are damaged; {store.path(index)}: {first}. Delete {names}"
            f"{' ...' if len(bad) > 10 else ''} and run the stage again: it captures what is missing."
        )
    _refuse_drift(counts["content"], tally, content, store)


def _refuse_drift(
    captured: dict[str, int], tally: Tally, content: ContentCheck | None, store: HiddenStateStore
) -> None:
    then = Tally(captured["hits"], captured["looked_at"])
    # A rerun counts only what it has captured itself: a few rows may have quite another rate than all.
    comparable = then.looked_at > tally.looked_at / 2
    if content is not None and comparable and abs(then.rate - tally.rate) > _RATE_DRIFT:
        raise StageError(
            f"{store.folder}: the states predict {tally.rate:.1%} of the supervised tokens, {then.rate:.1%} "
            "when they were captured. The verifier or the data set is not the one that they were made from."
        )
