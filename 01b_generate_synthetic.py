"""Asks the verifier for its own answers to prompts/train.jsonl -> responses/, and dataset/ with exact ids.

  Kimi-K2.5 with thinking; eight answers to look at, before paying for all:
    python 01b_generate_synthetic.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --sample 8
  two servers that run already, 64 requests in flight at each:
    python 01b_generate_synthetic.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --concurrency 64 \\
        --no-serve --endpoint http://node1:8000/v1 --endpoint http://node2:8000/v1
  two minutes on a laptop CPU:
    python 01b_generate_synthetic.py --verifier models/smollm2-135m-instruct --serve --run-dir runs/laptop \\
        --server-args '--max-model-len 2048' --limit 20 --max-tokens 64
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import textwrap
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import atomic_io, cli, generation, log, manifest, verifier, vllm_server
from common.conversations import Conversation
from common.errors import InputError, StageError
from common.inference_pool import InferencePool, RequestFailed
from common.responses import FLAGS, Reader, ResponseLog, Turn, training_row

if TYPE_CHECKING:
    from common.dataset import TrainingRow

STAGE = Path(__file__).stem
_LOG = log.get(STAGE)
_MANAGED_OUTAGE_S = 10.0  # a server that this stage started does not come back by itself


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    verifier.add_arguments(parser)
    vllm_server.add_arguments(parser)
    flag = argparse.BooleanOptionalAction

    sampling = parser.add_argument_group("Sampling")
    sampling.add_argument(
        "--max-tokens",
        type=cli.positive,
        default=2048,
        metavar="TOKENS",
        help="longest answer, thinking included",
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy; default: the server's for this model"
    )
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="share of probability (0 to 1); default: the server's"
    )
    sampling.add_argument(
        "--seed", type=int, help="sent with each request; default: none (one kills vLLM's CPU server)"
    )
    sampling.add_argument(
        "--extra-body",
        type=cli.json_value,
        metavar="JSON",
        help="more request fields, e.g. '{\"top_k\": 20}'",
    )
    sampling.add_argument(
        "--thinking",
        choices=("on", "off", "default"),
        default="default",
        help="sent to the chat template; default: nothing is sent",
    )
    sampling.add_argument(
        "--thinking-key",
        default="thinking",
        metavar="NAME",
        help="the template's variable: thinking (Kimi, DeepSeek) or enable_thinking (Qwen, GLM)",
    )

    load = parser.add_argument_group("Load")
    load.add_argument("--server-model", metavar="NAME", help="model name to ask for; default: the verifier's")
    load.add_argument(
        "--concurrency",
        type=cli.positive,
        default=32,
        metavar="N",
        help="requests in flight for each endpoint",
    )
    load.add_argument(
        "--timeout", type=float, default=3600, metavar="SECONDS", help="longest wait for one answer"
    )
    load.add_argument(
        "--max-attempts", type=cli.positive, default=8, metavar="N", help="sendings of one request"
    )
    load.add_argument(
        "--outage", type=float, default=900, metavar="SECONDS", help="longest wait while no endpoint answers"
    )
    load.add_argument(
        "--grace", type=float, default=30, metavar="SECONDS", help="for requests in flight after Ctrl-C"
    )
    load.add_argument(
        "--max-failure-rate",
        type=cli.share,
        default=0.05,
        metavar="SHARE",
        help="stop where a larger share (0 to 1) of the prompts fails",
    )

    rows = parser.add_argument_group("Rows")
    rows.add_argument(
        "--limit",
        type=cli.positive,
        metavar="N",
        help="only the first N prompts, in dataset/ too; default: all",
    )
    rows.add_argument(
        "--sample",
        type=cli.positive,
        metavar="N",
        help="answer N prompts spread over the file, show them and stop; they are kept for the full run",
    )
    rows.add_argument("--retry-failed", action=flag, default=False, help="ask failed prompts again")
    rows.add_argument(
        "--allow-retokenized",
        action=flag,
        default=False,
        help="take a server without return_token_ids: tokenise its text where that provably gives the same",
    )
    for name, what, default in (
        ("truncated", "cut at --max-tokens", False),
        ("empty", "without text, thinking or tool call", True),
        ("loop", "of which half repeats itself (16-grams)", False),
        ("tool-marker", "with tool-call markers inside the thinking", False),
    ):
        rows.add_argument(
            f"--drop-{name}", action=flag, default=default, help=f"no training rows from answers {what}"
        )
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    vllm_server.check(args)
    prompts_file = args.run_dir / "prompts" / "train.jsonl"
    prepared = manifest.read(args.run_dir / "prompts", "01_prepare_data.py")
    model = verifier.from_args(args, prepared.facts)
    dataset_folder, folder = args.run_dir / "dataset", args.run_dir / "responses"
    _refuse_kept_answers(dataset_folder, args.overwrite)
    ids = _choose(prompts_file, args.limit, args.sample)
    record = manifest.Manifest(
        stage=STAGE,
        config=_config(args, model),
        inputs={"prompts": manifest.fingerprint(prompts_file)},
        facts=model.facts() | {"thinking": args.thinking, "retokenized": args.allow_retokenized},
    )
    log_file = args.run_dir / "logs" / f"{STAGE}.log"
    with atomic_io.locked(folder):
        working = manifest.begin(folder, record, overwrite=args.overwrite, accept_stale=args.accept_stale)
        with ResponseLog(folder) as responses:
            if args.server_model:
                _refuse_other_model(folder, responses.model, args.server_model)
            todo = {i for i in ids if i not in responses and (args.retry_failed or i not in responses.failed)}
            answered = sum(i in responses for i in ids)
            _LOG.info(
                "prompts: %d chosen = %d answered + %d failed + %d to do; at most %d x %d = %s tokens a turn",
                *(len(ids), answered, len(ids) - answered - len(todo), len(todo)),
                *(len(todo), args.max_tokens, log.human_count(len(todo) * args.max_tokens)),
            )
            reader = Reader(model, args.allow_retokenized)
            if todo and not working:
                manifest.reopen(folder)
                working = True
            try:
                if todo:
                    with vllm_server.serving(args, model, [], log_file) as endpoints:
                        prompts = _prompts(prompts_file, todo)
                        asyncio.run(_generate(args, endpoints, reader, responses, prompts, len(todo)))
            finally:
                if not len(responses) and not responses.failed:
                    manifest.abandon(folder)
            if args.sample:
                _show(responses, ids)
            stored = (responses.read(i) for i in ids if i in responses)
            first = list(islice(stored, generation.FIRST))
            generation.check_thinking(args.thinking, args.thinking_key, reader, first)
            if args.sample:
                return 0
            if working:
                _finish(folder, record, responses, ids, args.max_failure_rate)
            _write_dataset(args, folder, dataset_folder, reader, responses, ids)
    return 0


def _config(args: argparse.Namespace, model: verifier.Verifier) -> dict[str, Any]:
    """The settings that decide what the answers are; dropping rows comes later and is not among them."""
    names = ("max_tokens", "temperature", "top_p", "seed", "extra_body", "thinking", "allow_retokenized")
    settings = {name: getattr(args, name) for name in names}
    key = args.thinking_key if args.thinking != "default" else None
    return {"verifier": model.name, "revision": model.revision, **settings, "thinking_key": key}


def _refuse_kept_answers(dataset_folder: Path, overwrite: bool) -> None:
    if overwrite or not (dataset_folder / manifest.NAME).exists():
        return
    stage = manifest.read(dataset_folder, STAGE).stage
    if stage != STAGE:
        raise InputError(
            f"{dataset_folder} holds rows that {stage} made. They would be replaced without a word. "
            "Pass --overwrite if the verifier's own answers shall take their place, or another --run-dir."
        )


def _refuse_other_model(folder: Path, stored: str | None, model: str) -> None:
    if stored not in (None, model):
        raise InputError(
            f"{folder} holds answers of the served model {stored!r}, now {model!r} is asked. Both would be "
            f"mixed without an error. Pass --server-model {stored} (vLLM takes several names for one model: "
            "--served-model-name), --overwrite to begin anew, or another --run-dir."
        )


# --------------------------------------------------------------------------------------------------------
# Prompts


def _choose(prompts_file: Path, limit: int | None, sample: int | None) -> list[str]:
    ids = [row["id"] for row in atomic_io.read_json_lines(prompts_file)]
    if len(set(ids)) != len(ids):
        twice = next(key for key, count in Counter(ids).items() if count > 1)
        raise InputError(f"{prompts_file}: id {twice} is there twice. Run 01_prepare_data.py --overwrite.")
    ids = ids[:limit]
    return ids[:: max(1, len(ids) // sample)][:sample] if sample else ids


def _prompts(prompts_file: Path, wanted: set[str]) -> Iterator[Conversation]:
    for row in atomic_io.read_json_lines(prompts_file):
        if row["id"] in wanted:
            yield Conversation.from_row(row).prompts()


# --------------------------------------------------------------------------------------------------------
# Generation


async def _generate(
    args: argparse.Namespace,
    endpoints: list[str],
    reader: Reader,
    responses: ResponseLog,
    prompts: Iterator[Conversation],
    total: int,
) -> None:
    """Answer each prompt once and store what comes, in order of arrival."""
    pool = InferencePool(
        endpoints,
        concurrency=args.concurrency,
        timeout_s=args.timeout,
        max_attempts=args.max_attempts,
        api_key=os.environ.get("VLLM_API_KEY", "EMPTY"),
        outage_s=_MANAGED_OUTAGE_S if args.serve else args.outage,
        grace_s=args.grace,
    )
    async with pool:
        model = generation.served_name(await pool.models(), args.server_model, reader.verifier.name)
        _refuse_other_model(args.run_dir / "responses", responses.model, model)
        generator = generation.Generator(pool, reader, _request(args, model))
        watch = generation.Watch(pool, reader, total, args.thinking, args.thinking_key, args.max_failure_rate)
        async with aclosing(pool.run(prompts, generator.answer)) as results:
            async for conversation, result in results:
                if isinstance(result, RequestFailed):
                    responses.fail(conversation.id, result)
                    watch.failed(result)
                else:
                    responses.add(result)
                    watch.answered(result)
        watch.close()


def _request(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What all requests have in common."""
    thinking = {"on": True, "off": False}.get(args.thinking)
    optional = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "chat_template_kwargs": None if thinking is None else {args.thinking_key: thinking},
    }
    given = {key: value for key, value in optional.items() if value is not None}
    fixed = {"model": model, "max_tokens": args.max_tokens, "return_token_ids": True}
    return fixed | given | (args.extra_body or {})


# --------------------------------------------------------------------------------------------------------
# Results


def _finish(
    folder: Path, record: manifest.Manifest, responses: ResponseLog, ids: list[str], max_failure_rate: float
) -> None:
    """Reconcile, and write the manifest of responses/."""
    responses.forget_mended_failures()
    written = sum(i in responses for i in ids)
    reasons = Counter(responses.failed[i]["reason"] for i in ids if i in responses.failed)
    if reasons.total() > max_failure_rate * len(ids):
        raise StageError(
            f"{reasons.total()} of {len(ids)} prompts failed ({generation.counted(reasons)}), more than "
            f"--max-failure-rate {max_failure_rate}; see {folder / 'failures.jsonl'}. Run again with "
            "--retry-failed, or allow more."
        )
    record.facts["server_model"] = responses.model
    record.counts = {
        "read": len(ids),
        "written": written,
        "failed": reasons.total(),
        "reasons": dict(reasons),
    }
    record.write(folder)


def _write_dataset(
    args: argparse.Namespace,
    folder: Path,
    dataset_folder: Path,
    reader: Reader,
    responses: ResponseLog,
    ids: list[str],
) -> None:
    """Make dataset/ out of responses/, unless it is there; it is cheap and follows --limit and --drop-*."""
    from common import dataset

    made = manifest.read(folder, STAGE)
    drop = [flag for flag in FLAGS if getattr(args, f"drop_{flag}")]
    record = manifest.Manifest(
        stage=STAGE,
        config={"drop": drop, "prompts": len(ids)},  # the first ones, so that their number says which
        inputs={"responses": manifest.fingerprint(folder)},
        facts=made.facts,
        accepted_stale=made.accepted_stale,
    )
    with atomic_io.locked(dataset_folder):
        if (dataset_folder / manifest.NAME).exists():
            earlier = manifest.read(dataset_folder, STAGE)
            if (earlier.config, earlier.inputs) == (record.config, record.inputs):
                _LOG.info("%s: already done, nothing to do", dataset_folder)
                return
            (dataset_folder / manifest.NAME).unlink()
        summary = Summary(reader, drop)
        rows = chain.from_iterable(summary.keep(responses.read(i)) for i in ids if i in responses)
        written = dataset.write(dataset_folder, rows)
        record.counts = {"read": summary.turns, "written": written, **summary.counts()}
        record.write(dataset_folder)
    print(summary.table())
    _LOG.info("%s: %d rows", dataset_folder, written)


class Summary:
    """Sorts turns into kept and dropped, and remembers what a reader wants to know of all of them.

    Args:
        reader: flags turns.
        drop: flags that cost a turn its training row.
    """

    def __init__(self, reader: Reader, drop: list[str]) -> None:
        self._reader = reader
        self._drop = drop
        self.turns = 0
        self._dropped: Counter[str] = Counter()
        self._finish: Counter[str] = Counter()
        self._flags: Counter[str] = Counter()
        self._stopped: Counter[str] = Counter()
        self._lengths = {name: array("L") for name in ("prompt", "reasoning", "answer")}
        self._longest: list[tuple[int, str]] = []

    def keep(self, row: dict[str, Any]) -> Iterator[TrainingRow]:
        """The training rows of a row of `responses.jsonl`."""
        if row["stopped"]:
            self._stopped[row["stopped"]] += 1
        for number, turn in enumerate(row["turns"]):
            flags = self._reader.flags(turn)
            self._count(f"{row['id']}#{number}", turn, flags)
            reason = next((flag for flag in flags if flag in self._drop), None)
            if reason is None and not turn["token_ids"]:
                reason = "empty"
            if reason:
                self._dropped[reason] += 1
            else:
                yield training_row(row, number)

    def counts(self) -> dict[str, dict[str, int]]:
        """For the manifest: turns without a row, flagged turns, conversations that ended early; by reason."""
        by_reason = {"dropped": self._dropped, "flagged": self._flags, "stopped": self._stopped}
        return {name: dict(counter) for name, counter in by_reason.items()}

    def table(self) -> str:
        """What was answered, for the terminal."""
        import numpy as np

        lines = [f"{'tokens':<12}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}{'sum':>12}"]
        for name, lengths in self._lengths.items():
            values = np.array(lengths)
            points = "".join(f"{point:>9.0f}" for point in np.percentile(values, (50, 90, 99, 100)))
            lines.append(f"{name:<12}{points}{log.human_count(values.sum()):>12}")
        lines += [
            f"answers: {self.turns} = {generation.counted(self._finish)} (finish reasons)",
            f"flagged: {generation.counted(self._flags)}; without a row: {generation.counted(self._dropped)}",
            f"conversations that ended early: {generation.counted(self._stopped)}",
            "longest: " + ", ".join(f"{turn} ({length} tokens)" for length, turn in self._longest),
        ]
        return "\n".join(lines)

    def _count(self, name: str, turn: Turn, flags: list[str]) -> None:
        reasoning = self._reader.reasoning_length(turn)
        length = len(turn["token_ids"])
        self.turns += 1
        self._finish[turn["finish_reason"] or "none"] += 1
        self._flags.update(flags)
        self._lengths["prompt"].append(len(turn["prompt_token_ids"]))
        self._lengths["reasoning"].append(reasoning)
        self._lengths["answer"].append(length - reasoning)
        self._longest = sorted([*self._longest, (length, name)], reverse=True)[:3]


def _show(responses: ResponseLog, ids: list[str]) -> None:
    """Print sampled answers; the run goes on where they end."""
    for prompt_id in ids:
        if prompt_id in responses.failed:
            print(f"\n=== {prompt_id}\nfailed: {responses.failed[prompt_id]['detail']}")
        if prompt_id not in responses:
            continue
        row = responses.read(prompt_id)
        print(f"\n=== {row['source']} {prompt_id}")
        for turn in row["turns"]:
            lengths = f"{len(turn['prompt_token_ids'])} + {len(turn['token_ids'])} tokens"
            print(f"--- {lengths}, {turn['seconds']:.1f} s, {turn['finish_reason']}")
            for name in ("reasoning", "content", "tool_calls"):
                if turn[name]:
                    print(f"{name}: {textwrap.shorten(str(turn[name]), 1500, placeholder=' ...')}")


if __name__ == "__main__":
    sys.exit(main())
