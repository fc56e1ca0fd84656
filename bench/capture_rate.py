"""Capture's rate against the server's own prefill and against speculators' generator, in alternating rounds.

    python bench/capture_rate.py                     # starts vLLM with the demo's verifier
    python bench/capture_rate.py --no-serve --endpoint http://127.0.0.1:8000/v1 --shared-folder FOLDER

All send the same rows with as many requests in flight to the same capturing server. `bare` reads the answers'
bytes and nothing else; `ours` checks, syncs and stores each row; `speculators` is its generate-offline-data.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from common import cli, dataset, verifier, vllm_server  # noqa: E402
from common.capture import Capture, Rows  # noqa: E402
from common.capture_vllm import VllmBackend  # noqa: E402
from common.hidden_states import ContentCheck, HiddenStateStore  # noqa: E402
from common.inference_pool import InferencePool  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.stage_parser(__doc__)
    verifier.add_arguments(parser)
    vllm_server.add_arguments(parser)
    parser.set_defaults(verifier=str(ROOT / "models" / "smollm2-135m-instruct"), serve=True)
    group = parser.add_argument_group("Measurement")
    group.add_argument("--rows", type=int, default=48, help="rows a round, of 64 to 512 random tokens")
    group.add_argument("--concurrency", type=int, default=32, help="requests in flight")
    group.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    group.add_argument("--shared-folder", type=Path, help="where a server of --endpoint writes")
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    model = verifier.from_args(args)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        rows = _write_rows(scratch / "dataset", args.rows, model.vocab_size)
        shared = args.shared_folder or scratch / "shared"
        shared.mkdir(exist_ok=True)
        flags = vllm_server.capture_args(model.default_layer_ids, model.num_layers, shared)
        with vllm_server.serving(args, model, flags, scratch / "server.log") as urls:
            seconds = _measure(args, urls[0], model, rows, shared, scratch)
    tokens = rows.tokens(rows.lengths)
    for side, times in seconds.items():
        share = sum(seconds["bare"]) / sum(times)
        rate = tokens / statistics.median(times)
        print(f"{side:12} {rate:7.0f} tokens/s (median of {len(times)}), {share:.1%} of the bare rate")
    return 0


def _write_rows(folder: Path, count: int, vocab_size: int) -> Rows:
    chance = random.Random(0)
    lengths = [chance.randint(64, 512) for _ in range(count)]
    dataset.write(
        folder,
        (
            {
                "input_ids": [chance.randrange(100, vocab_size) for _ in range(length)],
                "loss_mask": [int(position >= length // 4) for position in range(length)],
                "seq_len": length,
                "id": str(index),
                "source": "bench",
            }
            for index, length in enumerate(lengths)
        ),
    )
    return Rows.load(folder)


def _measure(
    args: argparse.Namespace, url: str, model: verifier.Verifier, rows: Rows, shared: Path, scratch: Path
) -> dict[str, list[float]]:
    """Seconds of each round; the order turns from round to round, and a first pass of each is thrown away."""
    from speculators.cli.generate_offline_data import generate_offline_data

    content = ContentCheck.of(model)
    ids = [*model.default_layer_ids, model.num_layers]

    def bare(folder: Path) -> None:
        asyncio.run(_bare(url, model.name, rows, args.concurrency))

    def ours(folder: Path) -> None:
        folder.mkdir()
        asyncio.run(
            _ours(url, model, rows, HiddenStateStore(folder, model.hidden_size), ids, shared, content, args)
        )

    def speculators(folder: Path) -> None:
        generate_offline_data(
            endpoint=url,
            preprocessed_data=str(scratch / "dataset"),
            output=str(folder),
            concurrency=args.concurrency,
            validate_outputs=True,
            request_timeout=3600.0,
        )

    sides = [bare, ours, speculators]
    times: dict[str, list[float]] = {side.__name__: [] for side in sides}
    for number in range(args.rounds + 1):
        for side in sides[number % 3 :] + sides[: number % 3]:
            begun = time.perf_counter()
            side(scratch / f"{side.__name__}-{number}")
            times[side.__name__].append(time.perf_counter() - begun)
    return {side: found[1:] for side, found in times.items()}


async def _bare(url: str, name: str, rows: Rows, concurrency: int) -> None:
    import aiohttp

    source = rows.longest_first(rows.lengths)

    async def worker(session: aiohttp.ClientSession) -> None:
        for row in source:
            body = {"model": name, "prompt": row.token_ids.tolist(), "max_tokens": 1, "temperature": 0.0}
            async with session.post(f"{url}/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))


async def _ours(
    url: str,
    model: verifier.Verifier,
    rows: Rows,
    store: HiddenStateStore,
    ids: list[int],
    shared: Path,
    content: ContentCheck,
    args: argparse.Namespace,
) -> None:
    async with InferencePool([url], concurrency=args.concurrency) as pool:
        backend = VllmBackend(pool, model.name, store, shared, ids, [])
        capture = Capture(rows, store, content, 0.0)
        await capture.run(nullcontext(backend), list(rows.lengths))
        assert capture.counts()["written"] == len(rows)


if __name__ == "__main__":
    sys.exit(main())
