"""The whole stage as a user runs it, against a server that misbehaves by script; at the end against vLLM."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common import dataset, inference_pool, log, manifest, responses
from common.verifier import Verifier
from tests import faulty_server as faults
from tests.conftest import ROOT, load_script
from tests.faulty_server import Body, Fault, FaultyServer

Run = Callable[..., int]
KIMI_LIKE = ROOT / "tests" / "kimi_like.jinja"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_pool, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(inference_pool, "_FIRST_PROBE_S", 0.05)


@pytest.fixture
def run(run_dir: Path, verifier_dir: Path) -> Run:
    """The stage on `run_dir`: `run(server, "--flag", ...)` -> exit code."""

    def run(server: FaultyServer, *flags: str) -> int:
        main = load_script("01b_generate_synthetic").main
        return main(_arguments(run_dir, verifier_dir, server, *flags))

    return run


def _arguments(run_dir: Path, verifier_dir: Path, server: FaultyServer, *flags: str) -> list[str]:
    where = ["--run-dir", str(run_dir), "--verifier", str(verifier_dir), "--endpoint", server.url]
    return [*where, "--server-model", faults.MODEL, *flags]


def _prepare(run_dir: Path, prompts: Sequence[str | list[str] | Body]) -> list[str]:
    """`prompts/` as stage 01 leaves it; a list of texts is a conversation of so many user turns."""
    rows = []
    for number, prompt in enumerate(prompts):
        texts = [prompt] if isinstance(prompt, str) else prompt
        extra: Body = texts if isinstance(texts, dict) else {"messages": [_user(text) for text in texts]}
        rows.append({"id": f"{number:032x}", "source": "test", **extra})
    folder = run_dir / "prompts"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest.Manifest(stage="01_prepare_data", config={}).write(folder)
    return [str(row["id"]) for row in rows]


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def _lines(run_dir: Path, name: str = "responses") -> list[Body]:
    return [json.loads(line) for line in (run_dir / "responses" / f"{name}.jsonl").read_text().splitlines()]


def _ids(run_dir: Path) -> list[str]:
    return [row["id"] for row in _lines(run_dir)]


def _dataset_ids(run_dir: Path) -> list[str]:
    return list(dataset.load(run_dir / "dataset")["id"])


# --------------------------------------------------------------------------------------------------------
# Right content


def test_a_row_is_the_servers_prompt_and_answer_ids_with_loss_on_the_answer(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["Hi"])
    with FaultyServer() as server:
        assert run(server) == 0
    row = dataset.load(run_dir / "dataset")[0]
    prompt, answer = list(b"<user>Hi<assistant>"), [*b"You said: Hi", faults.END_ID]
    assert row["input_ids"].tolist() == prompt + answer
    assert row["loss_mask"].tolist() == [0] * 19 + [1] * 13
    assert row["seq_len"] == 32
    assert row["id"] == "0" * 32 + "#0"
    assert row["source"] == "test"
    stored = _lines(run_dir)[0]
    assert stored["turns"][0].pop("seconds") >= 0
    assert stored == {
        "id": "0" * 32,
        "source": "test",
        "model": "stub",
        "turns": [
            {
                "prompt_token_ids": prompt,
                "token_ids": answer,
                "reasoning": None,
                "content": "You said: Hi",
                "tool_calls": None,
                "finish_reason": "stop",
                "usage": {"prompt_tokens": 19, "completion_tokens": 13},
            }
        ],
        "truncated": False,
        "stopped": None,
    }


def test_rows_are_in_the_order_of_the_prompts_and_not_of_arrival(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, [str(n) for n in range(8)])
    with FaultyServer(lambda n, _: Fault(delay_s=0.05 * (8 - n))) as server:
        assert run(server) == 0
    assert _ids(run_dir) != ids
    assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids]


def test_manifests_reconcile_and_carry_what_later_stages_must_agree_on(
    run: Run, run_dir: Path, verifier_dir: Path
) -> None:
    _prepare(run_dir, ["a", "b", ["c", "d"]])
    with FaultyServer() as server:
        assert run(server, "--thinking", "default") == 0
    made = manifest.read(run_dir / "dataset", "01b")
    assert made.counts == {"read": 4, "written": 4, "dropped": {}, "flagged": {}, "stopped": {}}
    assert made.facts["verifier"] == str(verifier_dir)
    assert made.facts["thinking"] == "default"
    assert made.facts["retokenized"] is False
    assert made.facts["server_model"] == "stub"
    assert manifest.read(run_dir / "responses", "01b").counts == {
        "read": 3,
        "written": 3,
        "failed": 0,
        "reasons": {},
    }


def test_only_what_was_asked_for_is_sent(run: Run, run_dir: Path) -> None:
    """Above all no seed: one seed kills vLLM's CPU server."""
    _prepare(run_dir, ["Hi"])
    with FaultyServer() as server:
        assert run(server) == 0
        assert server.bodies == [
            {"model": "stub", "messages": [_user("Hi")], "max_tokens": 2048, "return_token_ids": True}
        ]
        flags = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--max-tokens", "9", "--overwrite"]
        assert run(server, *flags, "--thinking", "off", "--extra-body", '{"top_k": 20}') == 0
        assert server.bodies[1] == {
            "model": "stub",
            "messages": [_user("Hi")],
            "max_tokens": 9,
            "return_token_ids": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "top_k": 20,
            "chat_template_kwargs": {"thinking": False},
        }


def test_each_turn_is_answered_after_the_models_own_answers(run: Run, run_dir: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, _user("one"), _user("two")]
    ids = _prepare(run_dir, [{"messages": messages}])
    with FaultyServer() as server:
        assert run(server) == 0
    answer = {"role": "assistant", "content": "You said: one"}
    assert [body["messages"] for body in server.bodies] == [
        messages[:2],
        [*messages[:2], answer, messages[2]],
    ]
    assert _dataset_ids(run_dir) == [f"{ids[0]}#0", f"{ids[0]}#1"]
    second = dataset.load(run_dir / "dataset")[1]
    prompt = b"<system>Be kind.<user>one<assistant>You said: one<user>two<assistant>"
    assert second["input_ids"].tolist() == [*prompt, *b"You said: two", faults.END_ID]
    assert second["loss_mask"].tolist() == [0] * len(prompt) + [1] * 14


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_both_its_names_and_goes_into_the_history(
    run: Run, run_dir: Path, field: str
) -> None:
    _prepare(run_dir, [["one", "two"]])

    def answer(body: Body) -> Body:
        return faults.response(body, message={field: "hm", "content": "yes"}, token_ids=[5, 6, 2])

    with FaultyServer(answer=answer) as server:
        assert run(server, "--thinking", "on") == 0
    assert [turn["reasoning"] for turn in _lines(run_dir)[0]["turns"]] == ["hm", "hm"]
    sent = server.bodies[1]["messages"][1]
    assert sent == {"role": "assistant", "content": "yes", "reasoning": "hm", "reasoning_content": "hm"}


def test_thinking_on_fails_within_the_first_32_responses_without_any(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, [str(n) for n in range(200)])
    with FaultyServer() as server:
        assert run(server, "--thinking", "on", "--concurrency", "4") == 1
        assert server.answered <= 32 + 2 * 4
    assert "none of the first 32 answers has reasoning" in capsys.readouterr().err
    assert not (run_dir / "dataset").exists()


def test_a_short_run_fails_for_its_thinking_too_and_again_when_it_is_rerun(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["a", "b"])
    with FaultyServer() as server:
        assert run(server, "--thinking", "on") == 1
        assert run(server, "--thinking", "on") == 1
        assert server.answered == 2


def test_thinking_off_fails_where_answers_think_all_the_same(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["a"])

    def answer(body: Body) -> Body:
        return faults.response(body, message={"reasoning": "hm", "content": "yes"}, token_ids=[5, 2])

    with FaultyServer(answer=answer) as server:
        assert run(server, "--thinking", "off", "--thinking-key", "enable_thinking") == 1
    assert "'enable_thinking' (--thinking-key)" in capsys.readouterr().err


def test_tools_are_passed_on_and_a_tool_call_ends_the_conversation(run: Run, run_dir: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    ids = _prepare(run_dir, [{"messages": [_user("time?"), _user("and now?")], "tools": tools}])
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}

    def answer(body: Body) -> Body:
        message = {"content": None, "tool_calls": [call]}
        return faults.response(body, message=message, token_ids=[9, 2], finish_reason="tool_calls")

    with FaultyServer(answer=answer) as server:
        assert run(server) == 0
    assert server.bodies[0]["tools"] == tools
    assert len(server.bodies) == 1
    row = _lines(run_dir)[0]
    assert row["stopped"] == "tool_calls"
    assert row["turns"][0]["tool_calls"] == [call]
    assert _dataset_ids(run_dir) == [f"{ids[0]}#0"]


def test_a_later_turn_that_is_too_long_costs_only_itself(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, [["one", "two", "three"]])
    with FaultyServer([None, faults.TOO_LONG]) as server:
        assert run(server) == 0
    assert _lines(run_dir)[0]["stopped"] == "http_400"
    assert _dataset_ids(run_dir) == [f"{ids[0]}#0"]


# --------------------------------------------------------------------------------------------------------
# Exact ids


def _without_ids(body: Body) -> Body:
    found = faults.proper_answer(body)
    del found["prompt_token_ids"], found["choices"][0]["token_ids"], found["usage"]
    return found


def test_a_server_without_token_ids_is_refused(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["Hi"])
    with FaultyServer(answer=_without_ids) as server:
        assert run(server) == 1
    assert "--allow-retokenized" in capsys.readouterr().err
    assert not (run_dir / "responses" / "manifest.json").exists()


def test_retokenised_rows_are_allowed_on_request_and_recorded(
    run: Run, run_dir: Path, verifier_dir: Path
) -> None:
    _prepare(run_dir, ["Hi"])
    with FaultyServer(answer=_without_ids) as server:
        assert run(server, "--allow-retokenized") == 0
    row = dataset.load(run_dir / "dataset")[0]
    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    assert tokenizer.decode(row["input_ids"]).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYou said: Hi<|im_end|>"
    )
    supervised = row["input_ids"][row["loss_mask"] == 1]
    assert tokenizer.decode(supervised) == "You said: Hi<|im_end|>"
    assert manifest.read(run_dir / "dataset", "01b").facts["retokenized"] is True


def test_a_retokenised_answer_ends_as_the_template_ends_it_and_not_with_the_tokenizers_eos(
    run_dir: Path, kimi_dir: Path, tmp_path: Path
) -> None:
    """Kimi's tokenizer has [EOS] 163585, its answers end in <|im_end|> 163586."""
    shutil.copytree(kimi_dir, tmp_path / "other-eos")
    config = tmp_path / "other-eos" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|endoftext|>"}))
    _prepare(run_dir, ["Hi"])
    with FaultyServer(answer=_without_ids) as server:
        flags = ["--allow-retokenized", "--thinking", "off"]
        main = load_script("01b_generate_synthetic").main
        assert main(_arguments(run_dir, tmp_path / "other-eos", server, *flags)) == 0
    row = dataset.load(run_dir / "dataset")[0]
    assert row["input_ids"][-1] == faults.END_ID
    assert AutoTokenizer.from_pretrained(tmp_path / "other-eos").eos_token_id == 0


@pytest.mark.parametrize(
    ("message", "usage", "reason"),
    [
        ({"content": "a\x04b"}, {}, "not_retokenizable"),
        ({"content": "yes", "reasoning": "hm"}, {}, "not_retokenizable"),
        ({"content": "yes", "tool_calls": [{}]}, {}, "not_retokenizable"),
        ({"content": "yes"}, {"completion_tokens": 17}, "ids_contradict_usage"),
    ],
)
def test_a_retokenised_row_that_cannot_be_proven_is_a_failure(
    run: Run, run_dir: Path, message: Body, usage: Body, reason: str
) -> None:
    _prepare(run_dir, ["Hi"])

    def answer(body: Body) -> Body:
        found = _without_ids(body)
        found["choices"][0]["message"] = message
        return {**found, "usage": usage}

    with FaultyServer(answer=answer) as server:
        assert run(server, "--allow-retokenized", "--max-failure-rate", "1") == 1
    assert [row["reason"] for row in _lines(run_dir, "failures")] == [reason]


@pytest.mark.parametrize(
    ("token_ids", "completion_tokens", "reason"),
    [([5, 6], 3, "ids_contradict_usage"), ([5, 49152], 2, "ids_outside_vocabulary")],
)
def test_ids_that_cannot_be_the_verifiers_are_a_failure(
    run: Run, run_dir: Path, token_ids: list[int], completion_tokens: int, reason: str
) -> None:
    _prepare(run_dir, ["a", "b"])

    def answer(body: Body) -> Body:
        if body["messages"][0]["content"] == "a":
            return faults.proper_answer(body)
        found = faults.response(body, message={"content": "x"}, token_ids=token_ids)
        found["usage"]["completion_tokens"] = completion_tokens
        return found

    with FaultyServer(answer=answer) as server:
        assert run(server, "--max-failure-rate", "0.5") == 0
    assert [row["reason"] for row in _lines(run_dir, "failures")] == [reason]
    assert manifest.read(run_dir / "responses", "01b").counts["reasons"] == {reason: 1}


# --------------------------------------------------------------------------------------------------------
# Flags


def _flawed(body: Body) -> Body:
    kind = body["messages"][0]["content"]
    word = list(b"all good. ")
    if kind == "truncated":  # inside the thinking: no content at all
        return faults.response(
            body, message={"content": None, "reasoning": "hm"}, token_ids=[5], finish_reason="length"
        )
    if kind == "empty":
        return faults.response(body, message={"content": "\n"}, token_ids=[198, 2])
    if kind == "loop":
        return faults.response(body, message={"content": "all good. " * 30}, token_ids=word * 30)
    if kind == "tool_marker":
        message = {"content": "yes", "reasoning": "I call <|tool_call_begin|>clock"}
        return faults.response(body, message=message, token_ids=[7, 2])
    return faults.proper_answer(body)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ([], ["fine", "truncated", "loop", "tool_marker"]),
        (["--drop-truncated"], ["fine", "loop", "tool_marker"]),
        (["--drop-loop"], ["fine", "truncated", "tool_marker"]),
        (["--drop-tool-marker", "--no-drop-empty"], ["fine", "truncated", "empty", "loop"]),
    ],
)
def test_flawed_answers_are_counted_and_dropped_on_request(
    run: Run, run_dir: Path, flags: list[str], kept: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["fine", "truncated", "empty", "loop", "tool_marker"]
    ids = dict(zip(kinds, _prepare(run_dir, kinds), strict=True))
    with FaultyServer(answer=_flawed) as server:
        assert run(server, *flags) == 0
    assert _dataset_ids(run_dir) == [f"{ids[kind]}#0" for kind in kept]
    assert {row["id"] for row in _lines(run_dir)} == set(ids.values())
    assert [row["id"] for row in _lines(run_dir) if row["truncated"]] == [ids["truncated"]]
    out = capsys.readouterr().out
    assert "1 truncated, 1 empty, 1 loop, 1 tool_marker" in out
    assert "4 stop, 1 length (finish reasons)" in out


def test_flags_and_conversations_that_ended_early_are_in_the_manifest(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["fine", ["truncated", "never asked"], "empty", "loop", "tool_marker"])
    with FaultyServer(answer=_flawed) as server:
        assert run(server) == 0
    assert manifest.read(run_dir / "dataset", "01b").counts == {
        "read": 5,
        "written": 4,
        "dropped": {"empty": 1},
        "flagged": {"truncated": 1, "empty": 1, "loop": 1, "tool_marker": 1},
        "stopped": {"truncated": 1},
    }


def test_an_answer_of_reasoning_alone_that_ends_by_itself_is_kept(run: Run, run_dir: Path) -> None:
    """speculators' regenerate-responses drops it (FIELD_NOTES 1.10)."""
    ids = _prepare(run_dir, ["Hi"])

    def answer(body: Body) -> Body:
        return faults.response(body, message={"content": None, "reasoning": "hm"}, token_ids=[7, 8, 2])

    with FaultyServer(answer=answer) as server:
        assert run(server, "--thinking", "on") == 0
    [row] = dataset.load(run_dir / "dataset")
    assert row["id"] == f"{ids[0]}#0"
    assert row["input_ids"][row["loss_mask"] == 1].tolist() == [7, 8, 2]


def test_other_drop_flags_make_the_data_set_again_without_asking_the_server(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, ["fine", "truncated"])
    with FaultyServer(answer=_flawed) as server:
        assert run(server) == 0
        assert run(server, "--drop-truncated") == 0
        assert len(server.bodies) == 2
    assert _dataset_ids(run_dir) == [f"{ids[0]}#0"]


# --------------------------------------------------------------------------------------------------------
# What Kimi's template does, on SmolLM2's tokenizer


@pytest.fixture(scope="session")
def kimi_dir(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with Kimi's behaviour: its template, and think tokens in the vocabulary."""
    folder = tmp_path_factory.mktemp("kimi")
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((verifier_dir / name).read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    tokenizer.chat_template = KIMI_LIKE.read_text()
    # Two reserved ids of the vocabulary take the marks' place, so that no id leaves it.
    tokenizer.save_pretrained(folder)
    text = (folder / "tokenizer.json").read_text()
    reserved = [f"<{name}>" for name in ("jupyter_start", "jupyter_text")]
    for old, new in zip(reserved, ("<think>", "</think>"), strict=True):
        assert old in text
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / "tokenizer.json").write_text(text)
    return folder


class KimiServer(FaultyServer):
    """Renders with the Kimi-like template and answers `text` as ids; has a reasoning parser or not."""

    def __init__(self, folder: Path, *, parser: bool, text: str = "hm</think>fine.<|im_end|>") -> None:
        super().__init__(answer=self._say)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._parser = parser
        self._text = text

    def _say(self, body: Body) -> Body:
        thinks = body.get("chat_template_kwargs", {}).get("thinking", True)
        text = self._text if thinks else self._text.rpartition("</think>")[2]
        thought, end, said = text.removesuffix("<|im_end|>").rpartition("</think>")
        message = (
            {"content": said, "reasoning": thought or None} if self._parser else {"content": thought + said}
        )
        if not end and thinks:
            message = {"content": None, "reasoning": said} if self._parser else {"content": said}
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        found = faults.response(
            body, message=message, token_ids=ids, finish_reason="stop" if text.endswith("|>") else "length"
        )
        found["prompt_token_ids"] = self.tokenizer.apply_chat_template(
            body["messages"],
            add_generation_prompt=True,
            return_dict=False,
            **body.get("chat_template_kwargs", {}),
        )
        found["usage"] = {}
        return found


def _decoded(run_dir: Path, server: KimiServer) -> list[tuple[str, str]]:
    """Each row's prompt and supervised text."""
    rows = dataset.load(run_dir / "dataset")
    return [
        tuple(server.tokenizer.decode(row["input_ids"][row["loss_mask"] == part]) for part in (0, 1))
        for row in rows
    ]


@pytest.mark.parametrize("parser", [True, False], ids=["reasoning-parser", "no-parser"])
def test_reasoning_is_supervised_in_its_turn_and_absent_from_the_next_prompt(
    run_dir: Path, kimi_dir: Path, parser: bool
) -> None:
    _prepare(run_dir, [["one", "two"]])
    with KimiServer(kimi_dir, parser=parser) as server:
        main = load_script("01b_generate_synthetic").main
        assert main(_arguments(run_dir, kimi_dir, server, "--thinking", "on")) == 0
    first, second = _decoded(run_dir, server)
    opening = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert first == (opening + "<think>", "hm</think>fine.<|im_end|>")
    assert second == (
        opening
        + "<think></think>fine.<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>",
        "hm</think>fine.<|im_end|>",
    )


def test_instant_mode_has_its_empty_thinking_in_the_prompt_and_passes_as_off(
    run_dir: Path, kimi_dir: Path
) -> None:
    _prepare(run_dir, ["one"])
    with KimiServer(kimi_dir, parser=True) as server:
        main = load_script("01b_generate_synthetic").main
        assert main(_arguments(run_dir, kimi_dir, server, "--thinking", "off")) == 0
    [(prompt, answer)] = _decoded(run_dir, server)
    assert prompt.endswith("<|im_start|>assistant\n<think></think>")
    assert answer == "fine.<|im_end|>"


def test_an_answer_cut_inside_its_thinking_keeps_its_ids_and_is_flagged(
    run_dir: Path, kimi_dir: Path
) -> None:
    """Its text lacks `</think>`: only the ids are right."""
    _prepare(run_dir, [["one", "two"]])
    with KimiServer(kimi_dir, parser=True, text="hm, let me see") as server:
        main = load_script("01b_generate_synthetic").main
        assert main(_arguments(run_dir, kimi_dir, server, "--thinking", "on")) == 0
    row = _lines(run_dir)[0]
    assert (row["truncated"], row["stopped"], row["turns"][0]["content"]) == (True, "truncated", None)
    assert [answer for _, answer in _decoded(run_dir, server)] == ["hm, let me see"]


def test_lengths_of_reasoning_and_answer_go_by_the_end_mark(kimi_dir: Path) -> None:
    reader = responses.Reader(Verifier(str(kimi_dir)))
    tokenizer = reader.verifier.tokenizer
    turn: Any = {"token_ids": tokenizer.encode("hm</think>fine."), "prompt_token_ids": [], "reasoning": "hm"}
    assert reader.reasoning_length(turn) == 2
    turn["token_ids"] = [5, 6, 7]
    turn["prompt_token_ids"] = tokenizer.encode("<think>")
    assert reader.reasoning_length(turn) == 3


# --------------------------------------------------------------------------------------------------------
# Nothing is lost, nothing twice


def test_a_refused_prompt_is_recorded_not_retried_and_asked_again_on_request(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, ["fine", "long"])
    refusing = True

    def misbehave(_: int, body: Body) -> Fault | None:
        return faults.TOO_LONG if refusing and body["messages"][0]["content"] == "long" else None

    with FaultyServer(misbehave) as server:
        assert run(server, "--max-failure-rate", "0.5") == 0
        [failure] = _lines(run_dir, "failures")
        assert failure.pop("detail").endswith("maximum context length is 2048 tokens")
        assert failure == {"id": ids[1], "reason": "http_400", "attempts": 1}
        refusing = False
        assert run(server, "--max-failure-rate", "0.5") == 0
        assert len(server.bodies) == 2
        assert run(server, "--retry-failed") == 0
        assert len(server.bodies) == 3
    assert _lines(run_dir, "failures") == []
    assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids]
    assert manifest.read(run_dir / "responses", "01b").counts["failed"] == 0


def test_too_many_failures_stop_the_run_early_with_their_reasons(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, [str(n) for n in range(500)])
    with FaultyServer(lambda *_: faults.TOO_LONG) as server:
        assert run(server, "--concurrency", "4") == 1
        assert len(server.bodies) < 40
    error = capsys.readouterr().err
    assert "20 of 20 prompts failed (20 http_400" in error
    assert "maximum context length is 2048 tokens" in error
    assert "--retry-failed" in error


def test_a_torn_last_line_is_repaired_and_its_prompt_asked_again(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, ["a", "b", "c"])
    with FaultyServer() as server:
        assert run(server) == 0
        (run_dir / "responses" / "manifest.json").unlink()
        log = run_dir / "responses" / "responses.jsonl"
        log.write_bytes(log.read_bytes()[:-20])
        assert run(server) == 0
        assert len(server.bodies) == 4
    assert sorted(_ids(run_dir)) == ids


def test_limit_and_sample_are_part_of_the_full_run(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = _prepare(run_dir, [f"prompt {n}" for n in range(10)])
    with FaultyServer() as server:
        assert run(server, "--sample", "2") == 0
        assert _ids(run_dir) == [ids[0], ids[5]]
        out = capsys.readouterr().out
        assert "You said: prompt 5" in out
        assert not (run_dir / "dataset").exists()
        assert run(server, "--limit", "3") == 0
        assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids[:3]]
        assert run(server) == 0
        assert len(server.bodies) == 10
    assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids]


def test_a_smaller_limit_makes_the_data_set_again_from_what_is_there(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, [f"prompt {n}" for n in range(5)])
    with FaultyServer() as server:
        assert run(server) == 0
        assert run(server, "--limit", "2") == 0
        assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids[:2]]
        assert run(server) == 0
        assert len(server.bodies) == 5
    assert _dataset_ids(run_dir) == [f"{i}#0" for i in ids]


def test_progress_is_logged_where_there_is_no_terminal(
    run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_TELL_EVERY_S", 0.0)
    _prepare(run_dir, ["a", "b"])
    with FaultyServer() as server:
        assert run(server, "--concurrency", "1") == 0
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("answers: ")]
    assert told[-1].startswith("answers: 2/2 prompts, ")
    assert "0 retries, 0 failures" in told[-1]


def test_a_finished_stage_is_recognised(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["a"])
    with FaultyServer() as server:
        assert run(server) == 0
        before = (run_dir / "dataset" / "manifest.json").read_bytes()
        assert run(server) == 0
        assert len(server.bodies) == 1
    assert (run_dir / "dataset" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "0.5"], "--temperature was None, now 0.5"),
        (["--thinking", "on"], "--thinking was 'default', now 'on'"),
    ],
)
def test_other_sampling_settings_do_not_mix_with_what_is_there(
    run: Run, run_dir: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["a"])
    with FaultyServer() as server:
        assert run(server) == 0
        assert run(server, *flags) == 2
    assert words in capsys.readouterr().err
    assert len(_dataset_ids(run_dir)) == 1


@pytest.mark.parametrize("limit", [["--limit", "1"], []], ids=["finished", "to-be-resumed"])
def test_answers_of_two_served_models_do_not_mix(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str], limit: list[str]
) -> None:
    _prepare(run_dir, ["a", "b"])
    with FaultyServer() as server:
        assert run(server, "--limit", "1") == 0
        assert run(server, "--server-model", "other", *limit) == 2
        assert "answers of the served model 'stub', now 'other'" in capsys.readouterr().err
        assert run(server) == 0
        assert len(server.bodies) == 2


def test_an_endpoint_whose_only_model_is_another_by_now_is_refused(
    run_dir: Path, verifier_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["a", "b"])
    main = load_script("01b_generate_synthetic").main
    with FaultyServer() as server:
        flags = ["--run-dir", str(run_dir), "--verifier", str(verifier_dir), "--endpoint", server.url]
        assert main([*flags, "--limit", "1"]) == 0
        log = run_dir / "responses" / "responses.jsonl"
        log.write_text(log.read_text().replace('"model": "stub"', '"model": "older"'))
        assert main(flags) == 2
        assert len(server.bodies) == 1
    assert "answers of the served model 'older', now 'stub'" in capsys.readouterr().err


def test_kept_answers_of_stage_01_are_not_replaced_without_a_word(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["a"])
    (run_dir / "dataset").mkdir()
    manifest.Manifest(stage="01_prepare_data", config={}).write(run_dir / "dataset")
    with FaultyServer() as server:
        assert run(server) == 2
        assert not server.bodies


def test_without_stage_01_or_a_server_nothing_is_written(run: Run, run_dir: Path) -> None:
    with FaultyServer() as server:
        assert run(server) == 2
        assert not run_dir.exists()
        _prepare(run_dir, ["a"])
        server.stop()
        assert run(server) == 2
        assert not (run_dir / "dataset").exists()
        server.start()
        assert run(server, "--temperature", "0.5") == 0  # nothing was begun with the other settings


def test_overwriting_without_a_server_or_its_model_leaves_the_old_answers(run: Run, run_dir: Path) -> None:
    _prepare(run_dir, ["a"])
    with FaultyServer() as server:
        assert run(server) == 0
        before = {path: path.read_bytes() for path in (run_dir / "responses").iterdir()}
        assert run(server, "--overwrite", "--server-model", "other") == 2
        server.stop()
        assert run(server, "--overwrite") == 2
        assert {path: path.read_bytes() for path in (run_dir / "responses").iterdir()} == before
        server.start()
        assert run(server, "--overwrite", "--temperature", "0.5") == 0
        assert [body.get("temperature") for body in server.bodies] == [None, 0.5]


@pytest.mark.parametrize("flag", ["--limit", "--sample", "--concurrency", "--max-tokens"])
def test_a_count_below_one_is_refused(run: Run, run_dir: Path, flag: str) -> None:
    with FaultyServer() as server, pytest.raises(SystemExit) as stop:
        run(server, flag, "-3")
    assert stop.value.code == 2


def test_a_model_that_the_server_does_not_have_is_named(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["a"])
    with FaultyServer() as server:
        assert run(server, "--server-model", "other") == 2
    assert "has no model 'other', only stub" in capsys.readouterr().err


def test_every_kind_of_passing_trouble_at_once_loses_nothing(run: Run, run_dir: Path) -> None:
    ids = _prepare(run_dir, [[f"{n}", "and"] for n in range(100)])
    dice = random.Random(0)
    kinds = [faults.RESET, faults.CUT_IN_THE_MIDDLE, faults.EMPTY, faults.NOT_JSON, faults.NO_CHOICES]
    kinds += [faults.BROKEN, faults.UNAVAILABLE, Fault(429, headers={"Retry-After": "0.1"}), faults.HANG]

    def misbehave(*_: Any) -> Fault | None:
        return dice.choice(kinds) if dice.random() < 0.3 else None

    with FaultyServer(misbehave) as server:
        flags = ["--concurrency", "16", "--max-attempts", "30", "--timeout", "0.5"]
        assert run(server, *flags) == 0
    assert sorted(_ids(run_dir)) == ids
    assert _dataset_ids(run_dir) == [f"{i}#{turn}" for i in ids for turn in (0, 1)]


# --------------------------------------------------------------------------------------------------------
# As processes


@pytest.fixture
def start(run_dir: Path, verifier_dir: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(server: FaultyServer, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "01b_generate_synthetic.py"]
        command += _arguments(run_dir, verifier_dir, server, "--concurrency", "4", *flags)
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start


def _await(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_second_process_stops_at_once_and_says_who_holds_the_lock(
    start: Callable[..., subprocess.Popen[str]], run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(run_dir, ["a"])
    release = threading.Event()

    def misbehave(*_: Any) -> Fault | None:
        return None if release.is_set() else faults.HANG

    with FaultyServer(misbehave) as server:
        first = start(server)
        _await(lambda: bool(server.bodies), first)
        assert run(server) == 1
        first.kill()
        first.communicate()
        assert f"locked by process {first.pid} on " in capsys.readouterr().err
        release.set()
        assert run(server) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_is_in_flight_and_exits_130(
    start: Callable[..., subprocess.Popen[str]], run: Run, run_dir: Path, number: signal.Signals
) -> None:
    ids = _prepare(run_dir, [str(n) for n in range(40)])
    with FaultyServer(lambda *_: Fault(delay_s=0.2)) as server:
        process = start(server)
        _await(lambda: server.answered >= 8, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "run the same command again to resume" in errors
        assert len(_ids(run_dir)) == server.answered < 40
        asked = len(server.bodies)
        assert asked == server.answered
        assert run(server) == 0
        assert len(server.bodies) == 40
    assert sorted(_ids(run_dir)) == ids


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_rerun_it_gives_the_undisturbed_ids(
    start: Callable[..., subprocess.Popen[str]], run: Run, run_dir: Path, kills: int
) -> None:
    """At least half of the kills come while answers arrive; after each the log holds each id once."""
    ids = _prepare(run_dir, [[f"{n}", "and"] for n in range(60 * kills)])
    dice = random.Random(kills)
    while_answering = 0
    with FaultyServer(lambda *_: Fault(delay_s=dice.random() * 0.02)) as server:
        for _ in range(kills):
            process = start(server)
            seen = server.answered
            more = dice.randrange(80)
            _await(lambda seen=seen, more=more: server.answered >= seen + more, process)  # type: ignore[misc]
            time.sleep(dice.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            while_answering += server.answered > seen
            stored = _complete_ids(run_dir)
            assert len(set(stored)) == len(stored)
        assert while_answering >= kills / 2
        assert run(server, "--concurrency", "16") == 0
        # An answer that was in flight or half written when the process died is asked for again, no other.
        assert server.answered <= 2 * len(ids) + kills * 4 * 2
    assert sorted(_ids(run_dir)) == ids
    assert _dataset_ids(run_dir) == [f"{i}#{turn}" for i in ids for turn in (0, 1)]
    for row in _lines(run_dir):
        number = int(row["id"], 16)
        assert [turn["content"] for turn in row["turns"]] == [f"You said: {number}", "You said: and"]


def _complete_ids(run_dir: Path) -> list[str]:
    path = run_dir / "responses" / "responses.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["id"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


# --------------------------------------------------------------------------------------------------------
# A real server


@pytest.mark.vllm
def test_real_answers_of_a_managed_server(run_dir: Path, verifier_dir: Path) -> None:
    """Ids decode to the text, prompts are the Kimi-like template's, and the end token is there."""
    ids = _prepare(run_dir, ["Say hello.", ["What is 2 + 2?", "And 3 + 3?"], "Count to three."])
    main = load_script("01b_generate_synthetic").main
    server_args = f"--max-model-len 1024 --chat-template {KIMI_LIKE}"
    flags = ["--serve", "--max-tokens", "48", "--temperature", "0", "--concurrency", "4", "--thinking", "off"]
    where = ["--run-dir", str(run_dir), "--verifier", str(verifier_dir)]
    assert main([*where, *flags, "--server-args", server_args]) == 0
    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    rows = {row["id"]: row for row in _lines(run_dir)}
    assert set(rows) == set(ids)
    for row in rows.values():
        for turn in row["turns"]:
            text = tokenizer.decode(turn["token_ids"], skip_special_tokens=True)
            assert text == turn["content"]
            assert (turn["token_ids"][-1] == 2) == (turn["finish_reason"] == "stop")
            prompt = tokenizer.decode(turn["prompt_token_ids"])
            assert prompt.endswith("<|im_start|>assistant\n<think></think>")
    assert tokenizer.decode(rows[ids[0]]["turns"][0]["prompt_token_ids"]) == (
        "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    first, second = rows[ids[1]]["turns"]
    assert tokenizer.decode(second["prompt_token_ids"]) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think></think>"
        f"{first['content']}<|im_end|>\n<|im_start|>user\nAnd 3 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )
    assert (run_dir / "dataset" / "manifest.json").exists()
