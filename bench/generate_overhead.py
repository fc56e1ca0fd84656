"""What 01b's client costs: its whole path against bare HTTP requests, in alternating rounds on one server.

    python bench/generate_overhead.py                # starts vLLM with the demo's verifier
    python bench/generate_overhead.py --no-serve --endpoint http://127.0.0.1:8000/v1 --verifier NAME

Both send the same prompts with as many in flight, greedy, `ignore_eos`: the server's work is the same.
The bare side reads the answer's bytes and throws them away; ours retries, checks, flags and stores them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from common import cli, verifier, vllm_server  # noqa: E402
from common.conversations import Conversation, Message  # noqa: E402
from common.generation import Generator, Watch  # noqa: E402
from common.inference_pool import InferencePool  # noqa: E402
from common.responses import Reader, ResponseLog  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.stage_parser(__doc__)
    verifier.add_arguments(parser)
    vllm_server.add_arguments(parser)
    demo = str(ROOT / "models" / "smollm2-135m-instruct")
    parser.set_defaults(verifier=demo, serve=True, server_args="--max-model-len 2048")
    group = parser.add_argument_group("Measurement")
    group.add_argument("--requests", type=int, default=32, help="requests a round")
    group.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    group.add_argument("--max-tokens", type=int, default=64, help="tokens an answer")
    group.add_argument("--rounds", type=int, default=10, help="rounds of each side")
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    model = verifier.from_args(args)
    with tempfile.TemporaryDirectory() as scratch:
        with vllm_server.serving(args, model, [], Path(scratch) / "server.log") as endpoints:
            bare, ours = asyncio.run(_measure(args, endpoints[0], Reader(model), Path(scratch)))
    pairs = [b / a - 1 for a, b in zip(bare, ours, strict=True)]
    print(f"bare: median {statistics.median(bare):.3f} s for {args.requests} requests")
    print(f"ours: median {statistics.median(ours):.3f} s")
    print(
        f"overhead: {sum(ours) / sum(bare) - 1:+.2%} of the sums, {statistics.median(pairs):+.2%} median pair"
    )
    return 0


async def _measure(
    args: argparse.Namespace, url: str, reader: Reader, scratch: Path
) -> tuple[list[float], list[float]]:
    """Seconds of each round, bare and ours; which comes first alternates, the first pair is thrown away."""
    request = {
        "model": reader.verifier.name,
        "max_tokens": args.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    prompts = [f"Tell me {n} facts about the number {n}." for n in range(args.requests)]
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    async with InferencePool([url], concurrency=args.concurrency) as pool:
        for number in range(args.rounds + 1):
            for side in sorted(times, reverse=number % 2 == 1):
                begun = time.perf_counter()
                if side == "bare":
                    await _bare(url, request, prompts, args.concurrency)
                else:
                    await _ours(pool, reader, request, prompts, scratch / str(number))
                times[side].append(time.perf_counter() - begun)
    return times["bare"][1:], times["ours"][1:]


async def _bare(url: str, request: dict[str, Any], prompts: list[str], concurrency: int) -> None:
    import aiohttp

    source = iter(prompts)

    async def worker(session: aiohttp.ClientSession) -> None:
        for prompt in source:
            body = {**request, "messages": [{"role": "user", "content": prompt}]}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))


async def _ours(
    pool: InferencePool, reader: Reader, request: dict[str, Any], prompts: list[str], folder: Path
) -> None:
    folder.mkdir()
    conversations = [Conversation(str(n), "bench", (Message("user", p),)) for n, p in enumerate(prompts)]
    watch = Watch(pool, reader, len(prompts), "default", "thinking", 0.0)
    generator = Generator(pool, reader, request)
    with ResponseLog(folder) as log:
        async with aclosing(pool.run(conversations, generator.answer)) as results:
            async for _, row in results:
                assert isinstance(row, dict), row
                log.add(row)
                watch.answered(row)


if __name__ == "__main__":
    sys.exit(main())
