"""Row 3: answers from one server: `01b` beside `speculators regenerate-responses` and raw requests.

    python -m bench.generate
    python -m bench.generate --quick

All ask for the same prompts with as many requests in flight, greedy, and every answer has the same length
(`ignore_eos`): the server's work is the same. The two commands are compared from the start of Python to the
last file. Raw requests read the answers' bytes and throw them away; beside them 01b runs in this process,
without the start of Python, but with all that it checks, writes and syncs.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import corpus, measure
from bench.measure import Spent
from common import atomic_io, demo_verifier
from common.verifier import Verifier

_TOKENS = 32
_CONCURRENCY = 32


def main() -> None:
    """Measure and report."""
    args = measure.begin(measure.parser(__doc__, rows=300, quick=16, rounds=2))
    model = Verifier(str(demo_verifier.ensure()))
    flags = ["--max-model-len", "2048"]
    with measure.scratch() as folder, measure.server(model, flags, folder / "server.log") as url:
        # The round that is thrown away only wakes server and imports up.
        for name, count in (("few", 8), ("all", args.rows)):
            corpus.write_prompts(folder / f"{name}.jsonl", count)
            prepare(folder / f"{name}.jsonl", folder / name)

        def fresh(side: str, number: int) -> Path:
            run_dir = folder / f"{side}-{number}"
            shutil.copytree(folder / ("all" if number else "few"), run_dir)
            return run_dir

        found = measure.alternate(
            {
                "01b": lambda number: stage(model, url, fresh("command", number)),
                "regenerate": lambda number: regenerate(model, url, fresh("theirs", number)),
                "01b in here": lambda number: stage_here(model, url, fresh("here", number)),
                "raw": lambda number: raw(model, url, fresh("raw", number)),
            },
            args.rounds,
            thrown_away=1,
        )
        last = args.rounds
        same = agreement(folder / f"command-{last}", folder / f"theirs-{last}", args.rows)
    what = f"{args.rows} answers of {_TOKENS} tokens, {_CONCURRENCY} in flight"
    lines = [
        measure.time_line(
            3, f"{what}: commands", found["01b"], found["regenerate"], "regenerate-responses", "<= 1.0"
        ),
        measure.time_line(
            3,
            f"{what}: without Python's start",
            found["01b in here"],
            found["raw"],
            "raw requests",
            "<= 1.03",
        ),
    ]
    measure.report(__file__, args, lines, [same], peaks=measure.peaks(found))


def prepare(prompts: Path, run_dir: Path) -> None:
    """A run folder as stage 01 leaves it, and the same prompts for the others."""
    flags = ("--dataset", prompts, "--eval-prompts", 0, "--workers", 1, "--run-dir", run_dir)
    measure.command((sys.executable, "01_prepare_data.py", *flags), run_dir.with_suffix(".log"))
    shutil.copy(prompts, run_dir / "prompts.jsonl")


def stage_flags(model: Verifier, url: str, run_dir: Path) -> list[str]:
    """Stage 01b's command line."""
    fixed = ("--temperature", 0, "--extra-body", '{"ignore_eos": true}', "--max-tokens", _TOKENS)
    where = ("--verifier", model.name, "--no-serve", "--endpoint", url, "--concurrency", _CONCURRENCY)
    return [str(flag) for flag in ("--run-dir", run_dir, *where, *fixed)]


def stage(model: Verifier, url: str, run_dir: Path) -> Spent:
    """Stage 01b as its user runs it."""
    command = (sys.executable, "01b_generate_synthetic.py", *stage_flags(model, url, run_dir))
    return measure.command(command, run_dir / "bench.log")


def stage_here(model: Verifier, url: str, run_dir: Path) -> Spent:
    """Stage 01b in this process."""

    def work() -> None:
        assert import_module("01b_generate_synthetic").main(stage_flags(model, url, run_dir)) == 0

    return measure.timed(work)


def regenerate(model: Verifier, url: str, run_dir: Path) -> Spent:
    """speculators' command; it finds the tokenizer by the served name, which is a path here."""
    sampling = '{"temperature": 0, "ignore_eos": true}'
    where = ("--endpoint", f"{url}/chat/completions", "--model", model.name)
    load = ("--concurrency", _CONCURRENCY, "--max-tokens", _TOKENS, "--sampling-params", sampling)
    files = ("--dataset", run_dir / "prompts.jsonl", "--outfile", run_dir / "theirs.jsonl")
    command = (*measure.SPECULATORS, "regenerate-responses", *where, *load, *files)
    return measure.command(command, run_dir / "bench.log", HF_DATASETS_CACHE=str(run_dir / "cache"))


def raw(model: Verifier, url: str, run_dir: Path) -> Spent:
    """Only the requests."""
    request = {
        "model": model.name,
        "max_tokens": _TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    prompts = [row["messages"] for row in atomic_io.read_json_lines(run_dir / "prompts" / "train.jsonl")]
    bodies = [{**request, "messages": messages} for messages in prompts]
    return measure.timed(lambda: asyncio.run(post_all(f"{url}/chat/completions", bodies, _CONCURRENCY)))


async def post_all(url: str, bodies: list[dict[str, Any]], concurrency: int) -> None:
    """Send every body, so many at a time, and read the answers' bytes."""
    import aiohttp

    source = iter(bodies)

    async def worker(session: aiohttp.ClientSession) -> None:
        for body in source:
            async with session.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))


def agreement(ours: Path, theirs: Path, count: int) -> str:
    """How many answers are the same tokens; the order of a batch moves sums, and greedy answers with them."""
    mine = {
        (tuple(turn["prompt_token_ids"]), tuple(turn["token_ids"]))
        for row in atomic_io.read_json_lines(ours / "responses" / "responses.jsonl")
        for turn in row["turns"]
    }
    beside = set()
    for row in atomic_io.read_json_lines(theirs / "theirs.jsonl"):
        split = row["loss_mask"].index(1)
        beside.add((tuple(row["input_ids"][:split]), tuple(row["input_ids"][split:])))
    assert len(mine) == len(beside) == count, (len(mine), len(beside), count)
    assert all(len(answer) == _TOKENS for _, answer in mine | beside)
    assert {prompt for prompt, _ in mine} == {prompt for prompt, _ in beside}
    return (
        f"both commands stored {count} answers of {_TOKENS} tokens to the same prompts; "
        f"{len(mine & beside)} are equal token for token (batches differ, and sums with them)"
    )


if __name__ == "__main__":
    main()
