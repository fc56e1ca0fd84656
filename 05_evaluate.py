"""Served acceptance and speed of drafters, from vLLM's counters -> evaluation/ (results, report, plot).

  the tuned Kimi-K2.5 drafter beside the one it started from, in domain and out of domain, on eight GPUs:
    python 05_evaluate.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --serve \\
        --drafter base=checkpoints/kimi-k2-instruct-eagle3 --drafter tuned=runs/kimi/drafter \\
        --prompts runs/kimi/prompts/eval.jsonl --prompts mt_bench.jsonl \\
        --num-speculative-tokens 2 3 4 --concurrency 1 8 32
  a server that already runs with prefix caching off and the named drafter (without --drafter: with none):
    python 05_evaluate.py --run-dir runs/kimi --endpoint http://gpu7:8000/v1 --drafter tuned=runs/kimi/drafter
  minutes on a laptop:
    python 05_evaluate.py --run-dir runs/laptop --serve --max-prompts 20 --max-tokens 128 --concurrency 4

The verifier alone is always measured first; the first --drafter is the start that the others are judged by,
and each is judged by those named after it too: base, finetuned, scratch is a good order.
Each finished run is kept in evaluation/runs.jsonl, so a rerun resumes, and new drafters, prompt files, K or
concurrencies are added to what is there. Intervals and parts need the acceptance of each answer: start a
server of your own with --per-request-spec-decode-metrics detailed. results.json is documented in
common/evaluation.py.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    atomic_io,
    cli,
    conversations,
    evaluation,
    hub,
    log,
    manifest,
    model_card,
    report,
    responses,
    verifier,
    vllm_server,
)
from common.acceptance import Counters
from common.errors import InputError, StageError
from common.evaluation import Answer, Run

if TYPE_CHECKING:
    from tqdm import tqdm

    from common.conversations import Conversation
    from common.inference_pool import InferencePool
    from common.verifier import Verifier

_LOG = log.get("05_evaluate")
_PER_REQUEST = ["--per-request-spec-decode-metrics", "detailed"]
_DRAFTER_FILES = ("*.json", "*.safetensors", "*.bin")
_WARM_UP_TOKENS = 8
_COUNTER_LAG_S = 10.0
_LOGPROBS = 20


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    what = parser.add_argument_group("What is measured")
    what.add_argument(
        "--drafter",
        action="append",
        metavar="NAME=PATH|HUB_ID",
        help="a drafter (folder, or ORGANISATION/MODEL[@REVISION] on the hub) and its name in the table; "
        "repeatable, the first is the start; default with --serve: drafter=RUN_DIR/drafter",
    )
    what.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help="JSON lines in any shape that 01 reads, answers left out; repeatable; "
        "default: RUN_DIR/prompts/eval.jsonl, which is also what counts as in domain",
    )
    what.add_argument(
        "--num-speculative-tokens",
        type=cli.positive,
        nargs="+",
        default=[3],
        metavar="K",
        help="draft tokens a verification step; a server start for each K and drafter",
    )
    what.add_argument(
        "--concurrency",
        type=cli.positive,
        nargs="+",
        default=[1],
        metavar="C",
        help="streams an endpoint at a time",
    )
    what.add_argument("--max-prompts", type=cli.positive, help="prompts a file; default: all")
    what.add_argument(
        "--max-tokens", type=cli.positive, default=512, help="longest answer of a turn, in tokens"
    )
    what.add_argument(
        "--thinking",
        choices=("on", "off", "default"),
        help="thinking mode asked of the chat template; default: as in 01b",
    )
    what.add_argument(
        "--min-acceptance-length",
        type=float,
        default=1.05,
        help="fail below this many tokens a step (1 = nothing is ever accepted)",
    )
    vllm_server.add_arguments(parser)
    verifier.add_arguments(parser)
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    vllm_server.check(args)
    drafters = named_drafters(args)
    files = read_files(args)
    jobs = plan(args, drafters, files)
    for url in args.endpoint or []:
        vllm_server.require_answer(url)
    if args.endpoint:
        require_server(read_counters(args.endpoint), jobs[0].drafter, jobs[0].k)
    inherited = inherited_facts(args.run_dir, drafters)
    model = verifier.from_args(args, inherited=inherited)
    thinking = manifest.settle(
        "thinking", flag=args.thinking, inherited=inherited.get("thinking"), default="default"
    )
    settings = {"max_tokens": args.max_tokens, "max_prompts": args.max_prompts, "thinking": thinking}
    record = manifest.Manifest(
        stage="05_evaluate",
        config={"verifier": model.name, "revision": model.revision, "server_args": args.server_args}
        | settings,
        inputs={f"prompts {file.name}": file.fingerprint for file in files}
        | {f"drafter {drafter.name}": drafter.fingerprint for drafter in drafters},
        facts={**model.facts(), "thinking": thinking},
    )
    folder = args.run_dir / "evaluation"
    with atomic_io.locked(folder):
        done = not manifest.begin(folder, record, overwrite=args.overwrite, accept_stale=args.accept_stale)
        runs = read_runs(folder / "runs.jsonl", drafters, args.accept_stale)
        jobs = missing(jobs, runs)
        if done and jobs:
            reopen(folder, record, len(jobs))
        if jobs or not done:
            announce(jobs, args.max_tokens)
            measure_into(runs, args, model, jobs, thinking, folder)
            found = evaluation.results(
                runs,
                drafters=[drafter.name for drafter in drafters],
                verifier=record.facts,
                settings={"temperature": 0, **settings},
                decode=lambda ids: str(model.tokenizer.decode(ids)),
            )
            write_report(folder, found, drafters)
            require_acceptance(found, args.min_acceptance_length)
            answered, refused = sum(len(run.answers) for run in runs), sum(run.refused for run in runs)
            record.counts = {"read": answered + refused, "written": answered, "failed": refused}
            record.write(folder)
        print((folder / "report.md").read_text())
    _LOG.info("%s: results.json, report.md, acceptance.png", folder)
    return 0


# ----------------------------------------------------------------------------------------------------------
# What is asked for


@dataclass(frozen=True)
class Drafter:
    """A drafter by name, and the fingerprint of its folder."""

    name: str
    path: str
    fingerprint: str


@dataclass(frozen=True)
class PromptFile:
    """The prompts of one file, each once."""

    name: str
    fingerprint: str
    in_domain: bool | None
    prompts: tuple[Conversation, ...]


@dataclass(frozen=True)
class Job:
    """One run to measure; `k` is 0 and `drafter` None for the verifier alone."""

    drafter: Drafter | None
    k: int
    file: PromptFile
    concurrency: int

    @property
    def key(self) -> evaluation.Key:
        """As the key of the run that it becomes."""
        return self.drafter.name if self.drafter else None, self.k, self.file.name, self.concurrency


def named_drafters(args: argparse.Namespace) -> list[Drafter]:
    """Read --drafter, and refuse what one call cannot measure before anything is started."""
    own = args.run_dir / "drafter"
    if not args.drafter and args.serve and not own.exists():
        raise InputError(f"{own} does not exist: run 04_train.py first, or pass --drafter NAME=PATH")
    named = args.drafter or ([f"drafter={own}"] if args.serve else [])
    drafters = [named_drafter(text) for text in named]
    names = [drafter.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise InputError(f"--drafter: each needs a name of its own, found {', '.join(names)}")
    if args.endpoint and len(drafters) * len(args.num_speculative_tokens) > 1:
        raise InputError(
            "--endpoint measures the one drafter and K that the server runs with: pass one --drafter and one "
            "--num-speculative-tokens, and run this again for the next server; or use --serve"
        )
    return drafters


def named_drafter(text: str) -> Drafter:
    """Read one --drafter; a hub's is downloaded."""
    name, _, place = text.partition("=")
    if not re.fullmatch(r"[\w.-]+", name) or not place:
        raise InputError(
            f"--drafter {text}: expected NAME=PATH or NAME=HUB_ID with a name of letters, digits, '.', '_' "
            "and '-', e.g. tuned=runs/demo/drafter"
        )
    repository, _, revision = (place, "", "") if Path(place).exists() else place.partition("@")
    folder = hub.folder(repository, revision or None, flag="--drafter", patterns=_DRAFTER_FILES)
    if not (folder / "config.json").exists():
        raise InputError(
            f"--drafter {text}: no config.json in {folder}. 04_train.py writes RUN_DIR/drafter at its end."
        )
    return Drafter(name, str(folder), manifest.fingerprint(folder))


def read_files(args: argparse.Namespace) -> list[PromptFile]:
    """Read --prompts; the held-out prompts of 01 are in domain, all others out of it."""
    held_out = args.run_dir / "prompts" / "eval.jsonl"
    files = []
    for name in args.prompts or [str(held_out)]:
        path = Path(name)
        prompts = {prompt.id: prompt for prompt in islice(conversations.read_prompts(path), args.max_prompts)}
        if not prompts:
            raise InputError(f"--prompts {name}: no prompts in it")
        in_domain = path.samefile(held_out) if held_out.exists() else None
        files.append(PromptFile(name, manifest.fingerprint(path), in_domain, tuple(prompts.values())))
    return files


def inherited_facts(run_dir: Path, drafters: list[Drafter]) -> dict[str, Any]:
    """Facts of the data set, else of the first drafter that has any."""
    for folder in (run_dir / "dataset", *(Path(drafter.path) for drafter in drafters)):
        if (folder / manifest.NAME).exists():
            return manifest.read(folder, "01b_generate_synthetic.py").facts
    return {}


def plan(args: argparse.Namespace, drafters: list[Drafter], files: list[PromptFile]) -> list[Job]:
    """All runs of this call, the verifier alone first; a server that already runs is measured as it is."""
    servers: list[tuple[Drafter | None, int]] = [
        (d, k) for d in drafters for k in args.num_speculative_tokens
    ]
    if args.serve or not drafters:
        servers.insert(0, (None, 0))
    jobs = [Job(d, k, file, c) for d, k in servers for file in files for c in args.concurrency]
    return list({job.key: job for job in jobs}.values())


def read_runs(path: Path, drafters: list[Drafter], accept_stale: bool) -> list[Run]:
    """What earlier calls measured with the same settings.

    Raises:
        InputError: a drafter's folder has changed since.
    """
    runs = [Run.from_row(row) for row in atomic_io.read_json_lines(path)] if path.exists() else []
    now: dict[str | None, str | None] = {drafter.name: drafter.fingerprint for drafter in drafters}
    for run in runs:
        if not accept_stale and now.get(run.drafter, run.drafter_fingerprint) != run.drafter_fingerprint:
            raise InputError(
                f"{path}: drafter {run.drafter} was another one when it was measured ({run.drafter_path}), "
                "and the table would mix both. Pass --overwrite, or give the new one another name."
            )
    return runs


def missing(jobs: list[Job], runs: list[Run]) -> list[Job]:
    """Jobs without a finished run."""
    finished = {run.key for run in runs}
    return [job for job in jobs if job.key not in finished]


def reopen(folder: Path, record: manifest.Manifest, count: int) -> None:
    """Add to a finished evaluation: what it was made from stays in the manifest."""
    _LOG.info("%s: %d runs of this call are new and are added", folder, count)
    record.inputs = {**manifest.read(folder, "05_evaluate.py").inputs, **record.inputs}
    manifest.reopen(folder)
    manifest.begin(folder, record, overwrite=False, accept_stale=True)


def announce(jobs: list[Job], max_tokens: int) -> None:
    servers = len({(job.drafter, job.k) for job in jobs})
    prompts = sum(len(job.file.prompts) for job in jobs)
    _LOG.info("%d servers, %d runs (servers x prompt files x concurrencies)", servers, len(jobs))
    tokens = log.human_count(prompts * max_tokens)
    _LOG.info("%d prompts x %d tokens a turn = %s tokens at most", prompts, max_tokens, tokens)


# ----------------------------------------------------------------------------------------------------------
# Measuring


def measure_into(
    runs: list[Run], args: argparse.Namespace, model: Verifier, jobs: list[Job], thinking: str, folder: Path
) -> None:
    """Measure the jobs; each finished run is appended to `runs` and to runs.jsonl."""
    try:
        with atomic_io.JsonLog(folder / "runs.jsonl") as kept:
            for run in measure_all(args, model, jobs, runs, thinking, folder):
                kept.append(run.to_row())
                runs.append(run)
    finally:
        if not runs:
            manifest.abandon(folder)


def measure_all(
    args: argparse.Namespace,
    model: Verifier,
    jobs: list[Job],
    runs: Sequence[Run],
    thinking: str,
    folder: Path,
) -> Iterator[Run]:
    """Start each server once and measure its jobs; `runs` are those that there are already, and it grows."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": args.max_tokens, "return_token_ids": True}
    if thinking != "default":
        # Kimi's template reads the one name, Qwen's the other; neither minds an unknown one.
        body["chat_template_kwargs"] = dict.fromkeys(("thinking", "enable_thinking"), thinking == "on")
    total = sum(len(job.file.prompts) for job in jobs)
    servers = list(dict.fromkeys((job.drafter, job.k) for job in jobs))
    with log.bar(total, unit="prompts", description="evaluate") as bar:
        for started, (drafter, k) in enumerate(servers, start=1):
            ours = [job for job in jobs if (job.drafter, job.k) == (drafter, k)]
            name = f"{drafter.name}-k{k}" if drafter else "verifier"
            _LOG.info("measuring %s", name)
            begun = time.monotonic()
            with vllm_server.serving(
                args, model, server_flags(drafter, k), args.run_dir / "logs" / f"05_evaluate-{name}.log"
            ) as endpoints:
                require_server(read_counters(endpoints), drafter, k)
                asyncio.run(warm_up(endpoints, ours[0].file.prompts, max(args.concurrency), body))
                tell_starts(bar, time.monotonic() - begun, len(servers) - started)
                for job in ours:
                    wanted = evaluation.reference(runs, job.key[0], job.file.name, job.concurrency)
                    yield asyncio.run(measure(endpoints, job, wanted, body, responses.Reader(model), bar))


def tell_starts(bar: tqdm, seconds: float, left: int) -> None:
    """Keep a server's start out of the prompts' rate, and show beside it how many are to come."""
    bar.unpause()
    starts = f"and {left} x {log.human_seconds(seconds)} of server starts" if left else ""
    bar.set_postfix_str(starts, refresh=False)


def server_flags(drafter: Drafter | None, k: int) -> list[str]:
    """vLLM's flags for one server: prefix caching off, acceptance told for each answer."""
    if drafter is None:
        return ["--no-enable-prefix-caching"]
    return [*vllm_server.speculative_args(Path(drafter.path), k), *_PER_REQUEST]


async def warm_up(
    endpoints: list[str], prompts: tuple[Conversation, ...], concurrency: int, body: dict[str, Any]
) -> None:
    """A few short answers first: kernels are compiled at the first requests, which is no drafter's fault."""
    from common.inference_pool import InferencePool

    async with InferencePool(endpoints, concurrency=concurrency) as pool:
        body = {**body, "model": await served_name(pool), "max_tokens": _WARM_UP_TOKENS}
        some = prompts[: concurrency * len(endpoints)]
        async for _ in pool.run(
            some, lambda prompt: pool.chat(messages=[m.to_openai() for m in prompt.messages], **body)
        ):
            pass


async def measure(
    endpoints: list[str],
    job: Job,
    wanted: Run | None,
    body: dict[str, Any],
    reader: responses.Reader,
    bar: tqdm,
) -> Run:
    """Send a file's prompts; read the counters before and after; compare the outputs with `wanted`.

    Raises:
        StageError: an answer could not be had, or the server was working for somebody else.
    """
    from common.inference_pool import InferencePool, RequestFailed

    found: dict[str, tuple[Answer, list[list[int]]]] = {}
    async with InferencePool(endpoints, concurrency=job.concurrency) as pool:
        body = {**body, "model": await served_name(pool)}
        before = idle_counters(endpoints)
        begun = time.monotonic()
        async for prompt, outcome in pool.run(
            job.file.prompts, lambda prompt: answer(pool, prompt, body, reader)
        ):
            bar.update()
            if not isinstance(outcome, RequestFailed):
                found[prompt.id] = outcome
            elif outcome.permanent:
                _LOG.warning("%s: prompt %s is left out: %s", job.file.name, prompt.id, outcome)
            else:
                raise outcome
        seconds = time.monotonic() - begun
        if not found:
            raise StageError(f"{job.file.name}: the server refused every prompt; the lines above say why")
        answers = [found[prompt.id][0] for prompt in job.file.prompts if prompt.id in found]
        tokens = sum(len(turn) for each in answers for turn in each.token_ids)
        counted = settled_counters(endpoints, before, tokens)
        contexts = {key: prompt_ids for key, (_, prompt_ids) in found.items()}
        gaps = await gaps_to(wanted, answers, contexts, pool, body["model"]) if wanted else {}
    return Run(
        drafter=job.drafter.name if job.drafter else None,
        drafter_path=job.drafter.path if job.drafter else None,
        drafter_fingerprint=job.drafter.fingerprint if job.drafter else None,
        prompts=job.file.name,
        in_domain=job.file.in_domain,
        num_speculative_tokens=job.k,
        concurrency=job.concurrency,
        drafts=counted.drafts,
        accepted=list(counted.accepted),
        output_tokens=tokens,
        seconds=seconds,
        refused=len(job.file.prompts) - len(answers),
        answers=answers,
        gaps=gaps,
    )


async def gaps_to(
    wanted: Run, answers: list[Answer], contexts: dict[str, list[list[int]]], pool: InferencePool, served: str
) -> dict[str, float]:
    """Ask the verifier how far apart it puts the two tokens where an output parts from the reference's.

    Args:
        wanted: the reference.
        answers: to compare with it.
        contexts: prompt id -> prompt ids of each turn of `answers`.
        pool: clients of the server.
        served: the verifier's name there.

    Returns:
        Prompt id -> nats; without those whose tokens are not among the first 20.
    """
    gaps = {}
    for expected, found, turn, token in evaluation.first_differences(wanted, answers):
        response = await pool.complete(
            model=served,
            prompt=contexts[found.id][turn] + found.token_ids[turn][:token],
            temperature=0,
            max_tokens=1,
            logprobs=_LOGPROBS,
            return_tokens_as_token_ids=True,
        )
        top = response["choices"][0]["logprobs"]["top_logprobs"][0]
        pair = [
            top.get(f"token_id:{side.token_ids[turn][token]}")
            for side in (expected, found)
            if token < len(side.token_ids[turn])
        ]
        if len(pair) == 2 and None not in pair:
            gaps[found.id] = abs(pair[0] - pair[1])
    return gaps


async def served_name(pool: InferencePool) -> str:
    """What the server calls the verifier."""
    return (await pool.models())[0]["id"]


async def answer(
    pool: InferencePool, prompt: Conversation, body: dict[str, Any], reader: responses.Reader
) -> tuple[Answer, list[list[int]]]:
    """Answer a prompt turn by turn, each seeing the answers before it; also the prompt ids of each turn."""
    from common.inference_pool import RequestFailed

    # Tool calls are wanted as the tokens they are; unlike "auto", "none" needs no flag of the server.
    tools = {"tools": prompt.tools, "tool_choice": "none"} if prompt.tools else {}
    messages: list[dict[str, Any]] = []
    turns: list[responses.Turn] = []
    steps: list[list[int] | None] = []
    for message in prompt.messages:
        messages.append(message.to_openai())
        if message.role != "user":
            continue
        request = {**body, **tools, "messages": list(messages)}
        try:
            response = await pool.chat(**request)
        except RequestFailed as error:
            # A long conversation may outgrow the context; the turns before it were answered and counted.
            if turns and error.permanent:
                break
            raise
        turns.append(reader.turn(request, response, 0.0))
        steps.append(accepted_by_step(response))
        messages.append(reader.as_history(turns[-1]))
    told = [turn for turn in steps if turn is not None]
    found = Answer(
        prompt.id,
        prompt.source,
        token_ids=[turn["token_ids"] for turn in turns],
        accepted_by_step=told if len(told) == len(steps) else None,
        thinking=[reader.reasoning_length(turn) for turn in turns],
    )
    return found, [turn["prompt_token_ids"] for turn in turns]


def accepted_by_step(response: dict[str, Any]) -> list[int] | None:
    """Draft tokens accepted in each verification step of an answer; None where the server does not tell.

    Without a step (an answer of one token) vLLM leaves the list out and keeps the rest.
    """
    told = (response.get("metrics") or {}).get("speculative_decoding")
    if told is None or (told["num_spec_steps"] and told.get("per_step_accepted") is None):
        return None
    return told.get("per_step_accepted") or []


# ----------------------------------------------------------------------------------------------------------
# Counters


def read_counters(endpoints: list[str]) -> Counters:
    """The counters of all servers together.

    Raises:
        StageError: a server does not give them.
    """
    import httpx

    texts = []
    for url in endpoints:
        try:
            texts.append(httpx.get(f"{vllm_server.root_url(url)}/metrics").raise_for_status().text)
        except httpx.HTTPError as error:
            raise StageError(f"{vllm_server.root_url(url)}/metrics cannot be read: {error}") from None
    return reduce(add, map(Counters.parse, texts))


def idle_counters(endpoints: list[str]) -> Counters:
    """The counters once two readings agree: earlier requests may be counted a moment after their answers.

    Raises:
        StageError: they never do.
    """
    deadline = time.monotonic() + _COUNTER_LAG_S
    counters = read_counters(endpoints)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        earlier, counters = counters, read_counters(endpoints)
        if counters == earlier:
            return counters
    raise StageError("the server is busy with somebody else's requests; run this again when it is idle")


def settled_counters(endpoints: list[str], before: Counters, tokens: int) -> Counters:
    """What was counted since `before`, once it has caught up with the `tokens` that arrived.

    Raises:
        StageError: the server generated other tokens too.
    """
    deadline = time.monotonic() + _COUNTER_LAG_S
    counted = read_counters(endpoints) - before
    while counted.output_tokens < tokens and time.monotonic() < deadline:
        time.sleep(0.1)
        counted = read_counters(endpoints) - before
    if counted.output_tokens != tokens:
        raise StageError(
            f"the server counted {counted.output_tokens} output tokens, {tokens} arrived here: somebody else "
            "uses it, or requests were sent again after a timeout, and its counters mix both. Run this again "
            "when the server is idle; finished runs are kept."
        )
    return counted


def require_server(counters: Counters, drafter: Drafter | None, k: int) -> None:
    """Refuse a server whose numbers would mean something else.

    Raises:
        InputError: prefix caching is on, or the server drafts with another K than asked for.
    """
    if counters.prefix_caching:
        raise InputError(
            "the server has prefix caching on: prompts that it saw before would be answered faster, so what "
            "is measured second would look better. Start it with --no-enable-prefix-caching."
        )
    served = counters.num_speculative_tokens
    if served != k:
        asked = f"--drafter {drafter.name} --num-speculative-tokens {k}" if drafter else "no --drafter"
        runs = f"drafts {served} tokens a step" if served else "runs without a drafter"
        raise InputError(f"the server {runs}, but this command line has {asked}: make them agree")


# ----------------------------------------------------------------------------------------------------------
# Results


def write_report(folder: Path, found: dict[str, Any], drafters: list[Drafter]) -> None:
    """`results.json` and its forms for people; a drafter of 04 gets its table into its model card as well."""
    report.plot(found, folder / "acceptance.png")
    with atomic_io.replacing(folder / "report.md") as file:
        file.write(report.markdown(found, "acceptance.png"))
    atomic_io.write_json(folder / "results.json", found)
    for drafter in drafters:
        if model_card.add_served(Path(drafter.path), drafter.name, found):
            _LOG.info("%s/README.md: the table of this evaluation is in it", drafter.path)


def require_acceptance(found: dict[str, Any], least: float) -> None:
    """Fail on a drafter that does not work; all measurements are written by then.

    Raises:
        StageError: a run's acceptance length is below `least`.
    """
    poor = [run for run in found["runs"] if run["drafter"] is not None and run["acceptance_length"] < least]
    if poor:
        seen = "; ".join(
            f"{run['drafter']} on {run['prompt_set']}: {run['acceptance_length']:.3f}" for run in poor
        )
        raise StageError(
            f"acceptance length below --min-acceptance-length {least}: {seen}. Hardly a draft token is "
            "accepted: the drafter only costs time. Likely causes, the most frequent first: its lm_head rows "
            "and its d2t do not belong together (a vocabulary rebuilt or reordered without its rows); layer "
            "ids of another convention (0-based ids are one lower than vLLM's); norm_before_residual, rope "
            "theta or scaling not as trained; another verifier, revision, chat template or thinking mode "
            "than it was trained for; too few steps. `04_train.py --finetune-from PATH --dry-run` measures "
            "it offline: if it is good there, the fault is in the served config.json. results.json and "
            "report.md are written."
        )


if __name__ == "__main__":
    sys.exit(main())
