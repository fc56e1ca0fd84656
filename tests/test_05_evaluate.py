"""05_evaluate.py: refusals without a server, and a whole evaluation of the real head by a real one."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM

from common import acceptance, log, manifest, vllm_server, warm_start
from common.acceptance import Counters
from common.errors import InputError, StageError
from common.evaluation import Answer
from common.inference_pool import InferencePool
from common.verifier import Verifier
from tests.conftest import ROOT, load_script
from tests.test_warm_start import FLAGS

script = load_script("05_evaluate")

PROMPTS = [
    "Name three uses of salt.",
    "What is 12 times 7? Explain each step.",
    "Write a short poem about rain.",
    "List the days of the week.",
    "Explain to a child why the sky is blue.",
    "Translate 'good morning' into French.",
]
TOKENS = 48


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "source": "own"}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def drafter_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# ----------------------------------------------------------------------------------------------------------
# Refusals


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert script.main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


def test_help_is_quick():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "05_evaluate.py", "--help"], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2


def test_a_server_must_be_named(run_dir, prompt_file, capsys):
    message = refused(capsys, "--run-dir", run_dir, "--prompts", prompt_file)
    assert "--serve" in message
    assert "--endpoint" in message
    assert not run_dir.exists()


def test_a_drafter_that_is_not_there_is_named_at_once(run_dir, prompt_file, tmp_path, capsys):
    base = ("--run-dir", run_dir, "--prompts", prompt_file, "--serve")
    assert "no such file or folder" in refused(capsys, *base, "--drafter", f"x={tmp_path / 'none'}")
    assert "NAME=PATH" in refused(capsys, *base, "--drafter", "just-a-name")
    assert "run 04_train.py first" in refused(capsys, *base)
    assert not run_dir.exists()
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(capsys, *base, "--drafter", f"x={tmp_path / 'empty'}")


def test_a_drafter_of_the_hub_is_taken_at_its_revision(tmp_path, monkeypatch):
    """The hub's own client reads a cache of this test's making; no network is here."""
    commits = {"main": "a" * 40, "v2": "b" * 40}
    for ref, commit in commits.items():
        folder = tmp_path / "models--org--head"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"ref": ref}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    newest, tagged = script.named_drafter("x=org/head"), script.named_drafter("y=org/head@v2")
    assert (newest.name, newest.path) == ("x", str(tmp_path / "models--org--head" / "snapshots" / ("a" * 40)))
    assert tagged.path.endswith("b" * 40)
    assert newest.fingerprint != tagged.fingerprint
    with pytest.raises(InputError, match="--drafter org/none is neither a file, a folder, nor a hub"):
        script.named_drafter("z=org/none")


def test_two_drafters_need_two_names(run_dir, prompt_file, drafter_dir, capsys):
    named = ("--drafter", f"x={drafter_dir}")
    message = refused(capsys, "--run-dir", run_dir, "--prompts", prompt_file, "--serve", *named, *named)
    assert "a name of its own" in message


def test_an_endpoint_has_one_drafter_and_one_k(run_dir, prompt_file, drafter_dir, capsys):
    base = ("--run-dir", run_dir, "--prompts", prompt_file, "--endpoint", "http://127.0.0.1:9/v1")
    one = ("--drafter", f"x={drafter_dir}")
    several = ("--num-speculative-tokens", "2", "3")
    for extra in ([*one, "--drafter", f"y={drafter_dir}"], [*one, *several]):
        assert "one drafter and K" in refused(capsys, *base, *extra)
    message = refused(capsys, *base, *one)
    assert "--endpoint http://127.0.0.1:9/v1 does not answer" in message
    assert "pass --serve" in message
    assert not run_dir.exists()


def test_bad_prompt_files_are_named(run_dir, drafter_dir, tmp_path, capsys):
    base = ("--run-dir", run_dir, "--serve", "--drafter", f"x={drafter_dir}", "--prompts")
    assert "no such file" in refused(capsys, *base, tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    assert "line 2" in refused(capsys, *base, tmp_path / "bad.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no prompts" in refused(capsys, *base, tmp_path / "empty.jsonl")


def test_k_and_concurrency_are_positive(run_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--run-dir", str(run_dir), "--num-speculative-tokens", "0"])
    assert ended.value.code == 2


def test_overwriting_with_a_server_that_dies_leaves_the_old_results(
    run_dir, verifier_dir, prompt_file, drafter_dir, capsys, monkeypatch
):
    folder = run_dir / "evaluation"
    manifest.Manifest("05_evaluate", {}).write(folder)
    (folder / "report.md").write_text("old")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    dying = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(vllm_server, "command", lambda *_: dying)
    argv = ["--run-dir", run_dir, "--serve", "--overwrite", "--verifier", verifier_dir]
    argv += ["--prompts", prompt_file, "--drafter", f"x={drafter_dir}"]
    assert script.main([str(argument) for argument in argv]) == 1
    assert "vLLM ended with code 3" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before


def test_a_server_with_prefix_caching_is_refused():
    with pytest.raises(InputError, match="--no-enable-prefix-caching"):
        script.require_server(Counters(0, (), 0, prefix_caching=True), None, 0)


def test_a_server_that_drafts_otherwise_than_asked_is_refused():
    drafter = script.Drafter("tuned", "runs/x/drafter", "f0")
    with pytest.raises(InputError, match=r"drafts 3 tokens a step, .*--num-speculative-tokens 2"):
        script.require_server(Counters(0, (0, 0, 0), 0, False), drafter, 2)
    with pytest.raises(InputError, match="runs without a drafter"):
        script.require_server(Counters(0, (), 0, False), drafter, 3)
    with pytest.raises(InputError, match="no --drafter"):
        script.require_server(Counters(0, (0, 0, 0), 0, False), None, 0)


# ----------------------------------------------------------------------------------------------------------
# Parts


def test_the_verifier_alone_is_first_and_each_server_starts_once(run_dir, prompt_file, drafter_dir):
    args = script.build_parser().parse_args(
        [
            *("--run-dir", str(run_dir), "--serve", "--prompts", str(prompt_file)),
            *("--drafter", f"a={drafter_dir}", "--drafter", f"b={drafter_dir}"),
            *("--num-speculative-tokens", "2", "4", "--concurrency", "1", "8"),
        ]
    )
    jobs = script.plan(args, script.named_drafters(args), script.read_files(args))
    assert [job.key[:2] for job in jobs[::2]] == [(None, 0), ("a", 2), ("a", 4), ("b", 2), ("b", 4)]
    assert [job.concurrency for job in jobs] == [1, 8] * 5


def test_held_out_prompts_are_in_domain_and_others_are_not(run_dir, prompt_file):
    (run_dir / "prompts").mkdir(parents=True)
    held_out = write_prompts(run_dir / "prompts" / "eval.jsonl")
    parser = script.build_parser()
    args = parser.parse_args(
        ["--run-dir", str(run_dir), "--prompts", str(held_out), "--prompts", str(prompt_file)]
    )
    assert [file.in_domain for file in script.read_files(args)] == [True, False]
    (default,) = script.read_files(parser.parse_args(["--run-dir", str(run_dir), "--max-prompts", "2"]))
    assert default.name == str(held_out)
    assert len(default.prompts) == 2


def test_a_server_start_is_no_prompt_s_time(monkeypatch):
    """Two prompts of a second each and a start of 100 s before either: 4 prompts left are 4 s, not 200."""
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    with log.bar(6, unit="prompts", description="evaluate") as bar:
        bar._time = lambda: now[0]
        for left in (1, 0):
            now[0] += 100
            script.tell_starts(bar, 100.0, left)
            assert bar.postfix == ("and 1 x 01:40 of server starts" if left else "")
            now[0] += 1
            bar.update()
        assert bar.format_dict["rate"] == pytest.approx(1.0)
        assert bar.format_dict["elapsed"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("response", "steps"),
    [
        ({}, None),
        ({"metrics": None}, None),
        ({"metrics": {"speculative_decoding": {"num_spec_steps": 2, "per_step_accepted": [0, 3]}}}, [0, 3]),
        # An answer of one token has no verification step.
        ({"metrics": {"speculative_decoding": {"num_spec_steps": 0}}}, []),
        # --per-request-spec-decode-metrics summary
        ({"metrics": {"speculative_decoding": {"num_spec_steps": 2}}}, None),
    ],
)
def test_acceptance_by_step_is_read_or_unknown(response: dict[str, Any], steps: list[int] | None):
    assert script.accepted_by_step(response) == steps


def test_a_drafter_that_does_not_draft_fails_with_the_likely_causes():
    runs = [
        {"drafter": None, "prompt_set": "a", "acceptance_length": 1.0},
        {"drafter": "good", "prompt_set": "a", "acceptance_length": 1.3},
        {"drafter": "bad", "prompt_set": "a", "acceptance_length": 1.01},
    ]
    with pytest.raises(StageError, match=r"1.05: bad on a: 1.010\..*d2t.*layer ids.*rope"):
        script.require_acceptance({"runs": runs}, 1.05)
    script.require_acceptance({"runs": runs}, 1.0)


def test_a_retrained_drafter_does_not_inherit_old_rows(tmp_path):
    from tests.test_evaluation import BASE, a_run, answers

    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(a_run("base", answers(BASE)).to_row()) + "\n")
    with pytest.raises(InputError, match="base was another one"):
        script.read_runs(path, [script.Drafter("base", "runs/base", "f1")], accept_stale=False)
    (run,) = script.read_runs(path, [script.Drafter("base", "runs/base", "f0")], accept_stale=False)
    assert run.key == ("base", 2, "a.jsonl", 1)


# ----------------------------------------------------------------------------------------------------------
# The real head on a real server: measured through --endpoint first, the verifier alone is added by --serve


@pytest.fixture(scope="module")
def thinker_dir(kimi_like_dir: Path, tmp_path_factory) -> Path:
    """SmolLM2 that thinks: its word " the" is called </think>, and the prompt ends in "The", called <think>.

    Weights and ids are SmolLM2's, so it answers as well as before, and most answers end their thinking.
    """
    folder = tmp_path_factory.mktemp("verifiers") / "thinker"
    folder.mkdir()
    for file in kimi_like_dir.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((kimi_like_dir / "tokenizer.json").read_text())
    model = tokenizer["model"]
    named = {"<think>": "The", "</think>": "\u0120the"}
    for mark, word in named.items():
        model["vocab"][mark] = model["vocab"].pop(word)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        entry = {"id": model["vocab"][mark], "content": mark, "special": True}
        tokenizer["added_tokens"].append(entry | flags)
    gone = set(named.values())
    model["merges"] = [pair for pair in model["merges"] if not gone & {*pair, "".join(pair)}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def served_head(thinker_dir: Path, public_head: Path, tmp_path_factory) -> Iterator[tuple[list[str], Path]]:
    """A running server with the shared head, K = 3, and the log's folder."""
    folder = tmp_path_factory.mktemp("server")
    parser = argparse.ArgumentParser()
    vllm_server.add_arguments(parser)
    flags = script.server_flags(script.Drafter("head", str(public_head), "f0"), 3)
    with vllm_server.serving(
        parser.parse_args(["--serve"]), Verifier(str(thinker_dir)), flags, folder / "vllm.log"
    ) as endpoints:
        yield endpoints, folder


@pytest.fixture(scope="module")
def evaluation_dir(served_head, thinker_dir: Path, public_head: Path, tmp_path_factory) -> Path:
    """The run folder after the endpoint was measured."""
    endpoints, _ = served_head
    run_dir = tmp_path_factory.mktemp("evaluated")
    code = script.main([*command(run_dir, thinker_dir, public_head), "--endpoint", endpoints[0]])
    assert code == 0
    return run_dir


def command(run_dir: Path, thinker_dir: Path, head: Path) -> list[str]:
    prompts = run_dir / "own.jsonl"
    if not prompts.exists():
        write_prompts(prompts)
    return [
        *("--run-dir", str(run_dir), "--verifier", str(thinker_dir), "--drafter", f"head={head}"),
        *("--prompts", str(prompts), "--max-tokens", str(TOKENS), "--concurrency", "3"),
    ]


def read_results(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "evaluation" / "results.json").read_text())


@pytest.mark.vllm
def test_the_public_head_is_accepted_as_measured_before(evaluation_dir: Path):
    """Field notes: 1.27 to 1.42 on three domains; wrong rows give 1.01, the verifier's own head 1.16."""
    (run,) = read_results(evaluation_dir)["runs"]
    assert (run["drafter"], run["num_speculative_tokens"]) == ("head", 3)
    assert 1.18 < run["acceptance_length"] < 1.65
    assert run["acceptance_by_position"] == sorted(run["acceptance_by_position"], reverse=True)
    assert run["acceptance_length"] == pytest.approx(1 + sum(run["acceptance_by_position"]))
    low, high = run["acceptance_length_interval"]
    assert low < run["acceptance_length"] < high
    # Only the first server of the two was there.
    assert run["speed_up"] is None


@pytest.mark.vllm
def test_the_counters_agree_with_the_answers(evaluation_dir: Path):
    (run,) = script.read_runs(evaluation_dir / "evaluation" / "runs.jsonl", [], accept_stale=False)
    by_request = acceptance.total(answer.acceptance(3) for answer in run.answers)
    assert run.counted == by_request
    assert run.output_tokens == sum(len(turn) for answer in run.answers for turn in answer.token_ids)
    for answer in run.answers:
        (ids,), (steps,) = answer.token_ids, answer.accepted_by_step
        # One token from the prefill, then accepted + 1 a step; the last step may run past the end.
        produced = 1 + len(steps) + sum(steps)
        assert produced - 3 <= len(ids) <= min(produced, TOKENS)


@pytest.mark.vllm
def test_thinking_and_answer_are_told_apart_by_the_ids_of_a_kimi_like_template(
    evaluation_dir: Path, thinker_dir: Path
):
    (run,) = script.read_runs(evaluation_dir / "evaluation" / "runs.jsonl", [], accept_stale=False)
    end = Verifier(str(thinker_dir)).tokenizer.convert_tokens_to_ids("</think>")
    for answer in run.answers:
        (ids,) = answer.token_ids
        # An answer that never ends its thinking is thinking: the template opened it.
        assert answer.thinking == [ids.index(end) + 1 if end in ids else len(ids)]
    assert 2 <= sum(end in answer.token_ids[0] for answer in run.answers) < len(PROMPTS)
    (found,) = read_results(evaluation_dir)["runs"]
    parts = found["by_part"]
    assert parts["thinking"]["drafts"] + parts["answer"]["drafts"] == found["drafts"]
    assert min(parts["thinking"]["drafts"], parts["answer"]["drafts"]) > 20
    report = (evaluation_dir / "evaluation" / "report.md").read_text()
    assert "| thinking |" in report
    assert "| answer " in report


@pytest.mark.vllm
async def test_the_counters_are_those_of_a_replay_of_the_same_tokens(
    served_head, thinker_dir: Path, public_head: Path
):
    """One prompt at a time. Where vLLM drafted, the head drafts again offline; right is what was generated.

    vLLM computes in bfloat16 and the replay in float32, so that near ties may go either way: the numbers of
    accepted tokens at each position agree within 3 % of the drafts.
    """
    endpoints, _ = served_head
    before = script.idle_counters(endpoints)
    answers = []
    async with InferencePool(endpoints, concurrency=1) as pool:
        served = await script.served_name(pool)
        for text in PROMPTS:
            asked = [{"role": "user", "content": text}]
            response = await pool.chat(
                model=served, messages=asked, temperature=0, max_tokens=TOKENS, return_token_ids=True
            )
            ids = response["choices"][0]["token_ids"]
            answers.append((response["prompt_token_ids"], ids, script.accepted_by_step(response)))
    counted = script.settled_counters(endpoints, before, sum(len(ids) for _, ids, _ in answers))

    replayed = Counter()
    right_after = replayer(thinker_dir, public_head)
    for prompt, generated, steps in answers:
        right = right_after(prompt, generated)
        place = 1  # the first token is the prefill's
        for accepted in steps:
            replayed["drafts"] += 1
            # The last step may have run past the end of what was asked for.
            replayed.update(range(right[place] if place < len(right) else 0))
            place += accepted + 1
    assert replayed["drafts"] == counted.drafts > 150
    for position in range(3):
        found = counted.accepted[position]
        assert replayed[position] == pytest.approx(found, abs=0.03 * counted.drafts), (replayed, counted)


def replayer(verifier_dir: Path, head: Path) -> Callable[[list[int], list[int]], list[int]]:
    """For prompt and answer: at each token of the answer, how many drafted from there on are the answer's."""
    model = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.float32).eval()
    args = argparse.Namespace(**{**vars(FLAGS), "finetune_from": str(head)})
    verifier, ids = Verifier(str(verifier_dir)), [2, 15, 27]
    plan = warm_start.open_plan(args, verifier, layer_ids=ids, rebuilt=None, speculative_tokens=3)
    drafter = warm_start.load(plan, verifier)

    @torch.no_grad()
    def replay(prompt: list[int], generated: list[int]) -> list[int]:
        tokens = torch.tensor([prompt + generated])
        hidden = model(tokens, output_hidden_states=True).hidden_states
        length = tokens.shape[1] - 1
        steps = drafter(
            hidden_states=torch.cat([hidden[layer][:, :-1] for layer in ids], dim=-1),
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=torch.ones(1, length),
            position_ids=torch.arange(1, length + 1)[None],
            ttt_steps=3,
        )
        drafted = torch.cat([step + drafter.d2t[step] for step in steps])
        # What stands in place of token p is drafted at index p - 2, where token p - 1 is embedded.
        return [
            int((drafted[: length + 1 - place, place - 2] == tokens[0, place : place + 3]).cumprod(0).sum())
            for place in range(len(prompt), length + 1)
        ]

    return replay


@pytest.mark.vllm
def test_a_server_that_is_not_what_was_asked_for_is_refused(
    served_head, thinker_dir, public_head, run_dir, capsys
):
    endpoints, _ = served_head
    run_dir.mkdir()
    base = command(run_dir, thinker_dir, public_head)
    assert script.main([*base, "--endpoint", endpoints[0], "--num-speculative-tokens", "2"]) == 2
    assert "drafts 3 tokens a step" in capsys.readouterr().err
    assert not (run_dir / "evaluation").exists()


@pytest.mark.vllm
async def test_the_gap_of_two_tokens_is_the_verifiers_own(served_head, evaluation_dir: Path):
    """The reference takes the runner-up at token 5: the gap must be what the server says of that place."""
    (endpoint,), _ = served_head
    (run,) = script.read_runs(evaluation_dir / "evaluation" / "runs.jsonl", [], accept_stale=False)
    found = run.answers[0]
    context = [[1, 4093, 198]]
    async with InferencePool([endpoint], concurrency=1) as pool:
        served = await script.served_name(pool)
        response = await pool.complete(
            model=served,
            prompt=context[0] + found.token_ids[0][:5],
            max_tokens=1,
            temperature=0,
            logprobs=20,
            return_tokens_as_token_ids=True,
        )
        top = {
            int(key.removeprefix("token_id:")): value
            for key, value in response["choices"][0]["logprobs"]["top_logprobs"][0].items()
        }
        first, second = sorted(top, key=lambda token: -top[token])[:2]
        ids = [*found.token_ids[0][:5], first]
        other = Answer(found.id, found.source, [[*ids[:5], second]], None, [0])
        this = Answer(found.id, found.source, [ids], None, [0])
        wanted = replace(run, answers=[other])
        gaps = await script.gaps_to(wanted, [this], {found.id: context}, pool, served)
    assert gaps == {found.id: pytest.approx(top[first] - top[second], abs=1e-3)}
    assert gaps[found.id] >= 0


@pytest.mark.vllm
def test_a_rerun_is_recognised_and_the_verifier_alone_is_added_later(
    evaluation_dir: Path, thinker_dir: Path, public_head: Path, capsys
):
    arguments = [*command(evaluation_dir, thinker_dir, public_head), "--serve"]
    before = (evaluation_dir / "evaluation" / "runs.jsonl").read_text()
    assert script.main(arguments) == 0
    after = (evaluation_dir / "evaluation" / "runs.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 2

    found = read_results(evaluation_dir)
    alone, head = found["runs"]
    assert (alone["drafter"], alone["acceptance_length"], alone["drafts"]) == (None, 1.0, 0)
    assert alone["acceptance_by_position"] == []
    assert head["speed_up"] == pytest.approx(head["output_tokens_per_s"] / alone["output_tokens_per_s"])
    assert head["same_output"]["compared"] == len(PROMPTS)
    # Greedy decoding in bf16 may part at a near tie; it never parts everywhere.
    assert head["same_output"]["equal"] >= 1
    report = (evaluation_dir / "evaluation" / "report.md").read_text()
    assert "verifier alone" in report
    record = manifest.read(evaluation_dir / "evaluation", "05")
    assert record.counts == {"read": 12, "written": 12, "failed": 0}
    assert record.facts["verifier"] == str(thinker_dir)

    capsys.readouterr()
    assert script.main(arguments) == 0
    assert (evaluation_dir / "evaluation" / "runs.jsonl").read_text() == after
    assert "verifier alone" in capsys.readouterr().out


@pytest.mark.vllm
def test_a_drafter_below_the_limit_fails_after_its_results_are_written(
    evaluation_dir: Path, thinker_dir: Path, public_head: Path, served_head, tmp_path, capsys
):
    endpoints, _ = served_head
    base = command(tmp_path, thinker_dir, public_head)
    few = ["--max-prompts", "2", "--max-tokens", "8", "--min-acceptance-length", "9"]
    assert script.main([*base, *few, "--endpoint", endpoints[0]]) == 1
    assert "Likely causes" in capsys.readouterr().err
    assert len(read_results(tmp_path)["runs"]) == 1
    assert not (tmp_path / "evaluation" / "manifest.json").exists()
