"""Row 4: states from one server: `03` beside `speculators generate-offline-data` and bare prefill.

    python -m bench.capture
    python -m bench.capture --quick
    python -m bench.capture --own-core   # the last core for the clients, the others for the server

All send the same rows with as many requests in flight to the same capturing server. The two commands are
compared from the start of Python to the last file; both check every file that they take over. Bare requests
read the answers' bytes and leave the server's files alone: that is its prefill rate. Beside them 03 runs in
this process, without the start of Python, but with all that it checks, syncs and renames. A first round over
a few rows is thrown away.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from bench import generate, measure
from bench.measure import Ratio, Spent
from common import dataset, demo_verifier, vllm_server
from common.capture import Rows
from common.hidden_states import HiddenStateStore
from common.verifier import Verifier

_CONCURRENCY = 32
_SHORTEST, _LONGEST = 64, 512
_FEW = 8
_TOLERANCE = 0.05  # bfloat16 sums in other batches


def main() -> None:
    """Measure and report."""
    parser = measure.parser(__doc__, rows=384, quick=8, rounds=2)
    parser.add_argument("--own-core", action="store_true", help="server and clients share no core")
    args = measure.begin(parser)
    model = Verifier(str(demo_verifier.ensure()))
    with measure.scratch() as folder:
        write_rows(folder / "few", _FEW, model.vocab_size)
        tokens = write_rows(folder / "rows", args.rows, model.vocab_size)
        (folder / "shared").mkdir()
        flags = [
            *vllm_server.capture_args(model.default_layer_ids, model.num_layers, folder / "shared"),
            *("--max-model-len", str(_LONGEST + 1)),
        ]
        with server(model, flags, folder / "server.log", args.own_core) as url:
            found = measure.alternate(
                {
                    "03": lambda number: stage(model, url, folder, f"command-{number}"),
                    "generate": lambda number: offline_data(url, folder, f"theirs-{number}"),
                    "03 in here": lambda number: stage_here(model, url, folder, f"here-{number}"),
                    "bare": lambda number: bare(model, url, folder, f"bare-{number}"),
                },
                args.rounds,
                thrown_away=1,
            )
        same = agreement(model, folder / "command-1", folder / "theirs-1", args.rows)
    what = f"states of {args.rows} rows, {tokens:,} tokens, {_CONCURRENCY} in flight"
    what += ", a core for the clients" if args.own_core else ""
    rates = {side: [tokens / spent.seconds for spent in found[side]] for side in found}
    shown = {side: f"{statistics.median(rate):,.0f} tokens/s" for side, rate in rates.items()}
    lines = [
        measure.time_line(
            4, f"{what}: commands", found["03"], found["generate"], "generate-offline-data", "<= 1.0"
        ),
        measure.Line(
            *(4, f"{what}: without Python's start", shown["03 in here"], f"bare prefill {shown['bare']}"),
            *(Ratio.of(rates["03 in here"], rates["bare"]), ">= 0.95"),
        ),
    ]
    measure.report(__file__, args, lines, [same], peaks=measure.peaks(found))


@contextmanager
def server(model: Verifier, flags: list[str], log_file: Path, own_core: bool) -> Iterator[str]:
    """As `measure.server`; with `own_core` this process and its commands then keep to the last core."""
    cores = sorted(os.sched_getaffinity(0))
    if own_core:
        os.sched_setaffinity(0, cores[:-1])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:-1]))
    with measure.server(model, flags, log_file) as url:
        os.sched_setaffinity(0, cores[-1:] if own_core else cores)
        yield url


def write_rows(folder: Path, count: int, vocab_size: int) -> int:
    """Rows of random tokens, which no prefix cache and no repetition makes shorter; returns the tokens."""
    chance = random.Random(0)
    lengths = [chance.randint(_SHORTEST, _LONGEST) for _ in range(count)]
    dataset.write(
        folder,
        (
            {
                "input_ids": [chance.randrange(100, vocab_size) for _ in range(length)],
                "loss_mask": [int(position >= length // 4) for position in range(length)],
                "seq_len": length,
                "id": f"{index}#0",
                "source": "bench",
            }
            for index, length in enumerate(lengths)
        ),
    )
    return sum(lengths)


def data(folder: Path, run: str) -> Path:
    """The rows of a run, which is named `side-round`; the round that is thrown away only wakes the server."""
    return folder / ("few" if run.endswith("-0") else "rows")


def stage_flags(model: Verifier, url: str, folder: Path, run: str) -> list[str]:
    """Stage 03's command line."""
    where = ("--verifier", model.name, "--no-serve", "--endpoint", url, "--concurrency", _CONCURRENCY)
    files = ("--run-dir", folder / run, "--dataset", data(folder, run), "--shared-folder", folder / "shared")
    return [str(flag) for flag in (*where, *files)]


def stage(model: Verifier, url: str, folder: Path, run: str) -> Spent:
    """Stage 03 as its user runs it."""
    command = (sys.executable, "03_capture_hidden.py", *stage_flags(model, url, folder, run))
    return measure.command(command, folder / f"{run}.log")


def stage_here(model: Verifier, url: str, folder: Path, run: str) -> Spent:
    """Stage 03 in this process."""

    def work() -> None:
        assert import_module("03_capture_hidden").main(stage_flags(model, url, folder, run)) == 0

    return measure.timed(work)


def offline_data(url: str, folder: Path, run: str) -> Spent:
    """speculators' command, which checks ids and lengths with --validate-outputs."""
    files = ("--preprocessed-data", data(folder, run), "--output", folder / run)
    load = ("--endpoint", url, "--concurrency", _CONCURRENCY, "--request-timeout", 3600)
    command = (*measure.SPECULATORS, "generate-offline-data", *files, *load, "--validate-outputs")
    return measure.command(command, folder / f"{run}.log")


def bare(model: Verifier, url: str, folder: Path, run: str) -> Spent:
    """Only the requests, longest row first as 03 sends them; the server's files are removed afterwards."""
    rows = Rows.load(data(folder, run))
    bodies = [
        {"model": model.name, "prompt": row.token_ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        for row in rows.longest_first(rows.lengths)
    ]
    spent = measure.timed(lambda: asyncio.run(generate.post_all(f"{url}/completions", bodies, _CONCURRENCY)))
    for file in (folder / "shared").iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    return spent


def agreement(model: Verifier, ours: Path, theirs: Path, count: int) -> str:
    """The largest distance between both sides' states, as a share of the state's own length."""
    mine, beside = (
        HiddenStateStore(folder, model.hidden_size) for folder in (ours / "hidden_states", theirs)
    )
    furthest = 0.0
    for row in range(count):
        (ids, states), (their_ids, their_states) = mine.read(row), beside.read(row)
        assert ids.equal(their_ids), f"row {row}: other tokens"
        states, their_states = states.float(), their_states.float()
        distance = (states - their_states).norm(dim=-1) / their_states.norm(dim=-1)
        furthest = max(furthest, float(distance.max()))
    assert furthest < _TOLERANCE, furthest
    return (
        f"both commands stored all {count} rows; the states differ by at most {furthest:.1e} of their length"
    )


if __name__ == "__main__":
    main()
