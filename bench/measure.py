"""What the rows share: alternating rounds, peaks of memory, ratios with their spread, the table's lines."""

from __future__ import annotations

import argparse
import datetime
import operator
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import atomic_io, cli, log, vllm_server
from common.errors import StageError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
SPECULATORS = (sys.executable, "-m", "speculators")
_SAMPLE_EVERY_S = 0.1
_GOALS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


# ----------------------------------------------------------------------------------------------------------
# The command line of a row's script


def parser(doc: str | None, *, rows: int, quick: int, rounds: int) -> argparse.ArgumentParser:
    """A parser with the flags that every row has.

    Args:
        doc: the script's docstring.
        rows: rows of the real measurement.
        quick: rows of `--quick`, which also makes one round.
        rounds: of each side.
    """
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("--rows", type=cli.positive, help=f"size; default: {rows:,}, {quick:,} with --quick")
    found.add_argument("--rounds", type=cli.positive, help=f"of each side; default: {rounds}, 1 with --quick")
    found.add_argument("--quick", action="store_true", help="small: does it work, not how fast is it")
    found.set_defaults(_sizes={False: (rows, rounds), True: (quick, 1)})
    return found


def begin(found: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, fill in sizes, and let this process log and reach servers on this machine."""
    args = found.parse_args()
    rows, rounds = args._sizes[args.quick]
    args.rows, args.rounds = args.rows or rows, args.rounds or rounds
    log.setup()
    cli.reach_loopback_directly()
    # Neither side shall wait for a hub that it does not need.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return args


# ----------------------------------------------------------------------------------------------------------
# One side, once


@dataclass(frozen=True)
class Spent:
    """What one run took.

    Attributes:
        seconds: by the clock.
        peak_bytes: most resident memory of the process and its children at one time, pages that they share
            counted once; 0 where it was not looked at.
    """

    seconds: float
    peak_bytes: int = 0


def timed(work: Callable[[], object]) -> Spent:
    """Run something of this process."""
    begun = time.perf_counter()
    work()
    return Spent(time.perf_counter() - begun)


def command(arguments: Sequence[object], log_file: Path, **environment: str) -> Spent:
    """Run a command to its end, in the repository's root.

    Args:
        arguments: the program and its arguments.
        log_file: where its output goes.
        environment: more variables.

    Raises:
        StageError: it failed; the message has its last lines.
    """
    peak = 0
    with log_file.open("wb") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(_SAMPLE_EVERY_S):
                peak = max(peak, resident_bytes(process.pid))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            code = process.wait()
            seconds = time.perf_counter() - begun
        finally:
            ended.set()
            watching.join()
            process.kill()
    if code:
        last = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
        raise StageError(f"{' '.join(map(str, arguments))} ended with code {code}:\n{last}")
    return Spent(seconds, peak)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it, shared pages counted once.

    The sum of what each holds alone, and the most that one of them shares. (Linux' own proportional size is
    also divided by processes that are not of these, such as a server that maps the same libraries.)
    """
    import psutil

    alone, shared = 0, 0
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            memory = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        alone += memory.uss
        shared = max(shared, memory.rss - memory.uss)
    return alone + shared


@contextmanager
def server(model: Any, flags: Sequence[str], log_file: Path) -> Iterator[str]:
    """A vLLM server for the time of a block; yields its URL, which ends in /v1."""
    args = argparse.Namespace(serve=True, endpoint=None, server_args="", server_timeout=600.0, port=None)
    with vllm_server.serving(args, model, flags, log_file) as urls:
        yield urls[0]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for data and outputs, on the disk of the repository's runs; gone at the end."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "runs") as name:
        yield Path(name)


# ----------------------------------------------------------------------------------------------------------
# Several sides, several rounds


Side = Callable[[int], Spent]


def alternate(sides: Mapping[str, Side], rounds: int, *, thrown_away: int = 0) -> dict[str, list[Spent]]:
    """Run the sides in turn; which one begins turns from round to round.

    Args:
        sides: called with the number of the round.
        rounds: that are kept.
        thrown_away: rounds before them, where caches of the server or the system matter.

    Returns:
        For each side what its rounds took.
    """
    names = list(sides)
    found: dict[str, list[Spent]] = {name: [] for name in names}
    for number in range(thrown_away + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            spent = sides[name](number)
            kept = "" if number >= thrown_away else ", thrown away"
            print(f"round {number}: {name:12} {spent.seconds:8.2f} s{kept}", flush=True)
            found[name].append(spent)
    return {name: spent[thrown_away:] for name, spent in found.items()}


@dataclass(frozen=True)
class Ratio:
    """Ours divided by the other side's, round by round: median, least and greatest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], beside: Sequence[float]) -> Ratio:
        """Divide rounds that were measured one after the other.

        Args:
            ours: one figure a round.
            beside: the other side's, in the same order.
        """
        each = [mine / theirs for mine, theirs in zip(ours, beside, strict=True)]
        return cls(statistics.median(each), min(each), max(each))

    def __str__(self) -> str:
        spread = f" [{self.low:.3g}-{self.high:.3g}]" if self.low < self.high else ""
        return f"{self.median:.3g}{spread}"


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        row: of the table in this folder's README.md.
        what: the work, with its size.
        ours: our figure with its unit.
        beside: the other side's, and whose it is.
        ratio: ours / beside.
        goal: `<= 0.5`, `>= 0.95`; empty where none is set.
    """

    row: int | str
    what: str
    ours: str
    beside: str
    ratio: Ratio
    goal: str = ""

    @property
    def met(self) -> str:
        """yes or no; empty without a goal."""
        if not self.goal:
            return ""
        sign, bound = self.goal.split()
        return "yes" if _GOALS[sign](self.ratio.median, float(bound)) else "no"

    @property
    def cells(self) -> list[str]:
        """The columns of `TABLE`."""
        return [str(self.row), self.what, self.ours, self.beside, str(self.ratio), self.goal, self.met]


TABLE = ("#", "what", "ours", "beside", "ratio [min-max]", "goal", "met")


def time_line(row: int, what: str, ours: list[Spent], beside: list[Spent], whose: str, goal: str) -> Line:
    """A line that compares seconds; figures and ratio are medians of the rounds."""
    mine, theirs = ([spent.seconds for spent in side] for side in (ours, beside))
    return Line(
        *(row, what, f"{statistics.median(mine):.2f} s", f"{whose} {statistics.median(theirs):.2f} s"),
        *(Ratio.of(mine, theirs), goal),
    )


def peaks(found: Mapping[str, Sequence[Spent]]) -> dict[str, list[int]]:
    """Each side's peak of memory in bytes by round, for row 8."""
    return {side: [spent.peak_bytes for spent in rounds] for side, rounds in found.items()}


def report(
    script: str,
    args: argparse.Namespace,
    lines: Sequence[Line],
    notes: Sequence[str] = (),
    **more: Any,
) -> None:
    """Print a row's lines and keep them in `results/<script>.json`.

    Args:
        script: the script's `__file__`.
        args: of `begin`.
        lines: of the table.
        notes: what a reader of the table must know; one sentence each.
        more: other figures for the file.
    """
    print(table(lines), *(f"* {note}" for note in notes), sep="\n", flush=True)
    atomic_io.write_json(
        RESULTS / f"{Path(script).stem}.json",
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "quick": args.quick,
            "rows": args.rows,
            "rounds": args.rounds,
            "lines": [asdict(line) for line in lines],
            "notes": list(notes),
            **more,
        },
    )


def lines_of(result: Mapping[str, Any]) -> list[Line]:
    """The lines that `report` kept."""
    return [Line(**{**line, "ratio": Ratio(**line["ratio"])}) for line in result["lines"]]


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    rows = [TABLE, ["---"] * len(TABLE), *(line.cells for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def machine() -> str:
    """Processor, cores and memory of this machine, for the table's caption."""
    import psutil

    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, {log.human_bytes(psutil.virtual_memory().total)}"
