"""The verifier's answers: exact ids of a response, what is wrong with it, the log on disk, training rows.

The ids that the server sent are the data. Kimi's template drops the reasoning of finished turns, so an answer
that is rendered again is not the answer that was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from common import atomic_io, chat
from common.conversations import Conversation, Dropped, Message
from common.dataset import TrainingRow
from common.errors import InputError, StageError
from common.inference_pool import RequestFailed
from common.verifier import Verifier

FLAGS = ("truncated", "empty", "loop", "tool_marker")

_OPENS_THINKING = ("<think>", "◁think▷", "[THINK]", "<seed:think>")
_ENDS_THINKING = ("</think>", "◁/think▷", "[/THINK]", "</seed:think>")
_TOOL_MARKERS = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_start|>"),
    *("<tool_call>", "<function=", "[TOOL_CALLS]"),
)
_PREFILL = 4  # ids at the end of a prompt in which a template opens, or opens and closes, the thinking
_NGRAM = 16
_LOOP_SHARE = 0.5  # of the answer's 16-grams that occurred before; code and tables stay below 0.2
_SHORTEST_LOOP = 64
_ID = re.compile(rb'{"id": "([^"\\]+)"')


class Turn(TypedDict):
    """One answer.

    Attributes:
        prompt_token_ids: [P] what the model saw.
        token_ids: [G] what it generated, with the end token where it ended by itself.
        reasoning: text before the answer, None without.
        content: the answer's text, None where it was cut while thinking.
        tool_calls: as in OpenAI's API, None without.
        finish_reason: `stop`, `length`, `tool_calls`, ...
        usage: the server's own counts.
        seconds: from sending the request to the whole response, retries included.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str | None
    usage: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Reader:
    """Reads responses of a server, with the verifier's tokenizer as the judge of ids.

    Attributes:
        verifier: whose answers these are.
        retokenize: make ids from text where the server sends none, as far as that can be proven.
    """

    verifier: Verifier
    retokenize: bool = False

    def turn(self, request: dict[str, Any], response: dict[str, Any], seconds: float) -> Turn:
        """A response as a turn with exact ids.

        Args:
            request: the body that was sent.
            response: parsed JSON of a chat completion.
            seconds: how long it took.

        Raises:
            RequestFailed: the ids contradict the server's own counts, or cannot be made from the text.
            StageError: the server sends no ids, and `retokenize` is off.
        """
        choice = response["choices"][0]
        message = choice.get("message") or {}
        turn = Turn(
            prompt_token_ids=response.get("prompt_token_ids") or [],
            token_ids=choice.get("token_ids") or [],
            reasoning=message.get("reasoning") or message.get("reasoning_content"),
            content=message.get("content"),
            tool_calls=message.get("tool_calls") or None,
            finish_reason=choice.get("finish_reason"),
            usage=response.get("usage") or {},
            seconds=round(seconds, 3),
        )
        if not turn["prompt_token_ids"] or choice.get("token_ids") is None:
            if not self.retokenize:
                raise StageError(
                    "the server sent no token ids for return_token_ids=true (prompt_token_ids and "
                    "choices[0].token_ids). Text that is tokenised again is often not what the model "
                    "generated, without an error. Serve with a vLLM that has it, or pass --allow-retokenized."
                )
            self._make_ids(request, turn)
        self._check_ids(turn)
        return turn

    def flags(self, turn: Turn) -> list[str]:
        """Which of `FLAGS` are true of a turn."""
        found = {
            "truncated": turn["finish_reason"] == "length",
            "empty": not (turn["content"] or "").strip() and not turn["reasoning"] and not turn["tool_calls"],
            "loop": repetition(turn["token_ids"]) > _LOOP_SHARE,
            "tool_marker": self._has_tool_marker(turn),
        }
        return [flag for flag in FLAGS if found[flag]]

    def thinks(self, turn: Turn) -> bool:
        """Whether reasoning arrived: as a field, as think marks in the answer, or opened by the prompt."""
        marked = not (self._opens | self._ends).isdisjoint(turn["token_ids"])
        written = any(mark in (turn["content"] or "") for mark in _ENDS_THINKING)
        return bool(turn["reasoning"]) or marked or written or self._is_opened(turn)

    def reasoning_length(self, turn: Turn) -> int:
        """Tokens up to and with the end of thinking; by share of characters where no id marks it."""
        if length := self._end_of_thinking(turn):
            return length
        if self._is_opened(turn) and self._ends:
            return len(turn["token_ids"])
        thought, said = len(turn["reasoning"] or ""), len(turn["content"] or "")
        return round(len(turn["token_ids"]) * thought / (thought + said)) if thought else 0

    def as_history(self, turn: Turn) -> dict[str, Any]:
        """The answer as a message of the next request; the server's template decides what of it is shown."""
        reasoning, content = turn["reasoning"], turn["content"]
        if not reasoning and (length := self._end_of_thinking(turn)):
            # A server without a reasoning parser leaves the thinking in the text, where no template looks.
            decode = self.verifier.tokenizer.decode
            reasoning = str(decode(turn["token_ids"][: length - 1], skip_special_tokens=True))
            content = str(decode(turn["token_ids"][length:], skip_special_tokens=True))
        message = {
            "role": "assistant",
            "content": content or "",
            "reasoning": reasoning,
            "reasoning_content": reasoning,  # the only name that older servers know
            "tool_calls": turn["tool_calls"],
        }
        return {key: value for key, value in message.items() if value is not None}

    def render(self, request: dict[str, Any]) -> list[int]:
        """Prompt ids by the verifier's own chat template.

        Raises:
            RequestFailed: the template refuses the conversation.
        """
        from jinja2 import TemplateError

        tokenizer = self.verifier.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                request["messages"],
                tools=request.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **request.get("chat_template_kwargs", {}),
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise _unusable("template_refuses", str(error)) from error
        return tokenizer.encode(str(text), add_special_tokens=False)

    def _make_ids(self, request: dict[str, Any], turn: Turn) -> None:
        """Fill in ids from the text; the server's counts must prove them where it sends any."""
        tokenizer = self.verifier.tokenizer
        text = turn["content"] or ""
        if turn["reasoning"] or turn["tool_calls"]:
            raise _unusable("not_retokenizable", "reasoning and tool calls were taken apart by the server")
        answer = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(answer, skip_special_tokens=False, clean_up_tokenization_spaces=False) != text:
            raise _unusable("not_retokenizable", "the text does not survive a round trip")
        end = [self._end_id] if turn["finish_reason"] == "stop" else []
        turn["prompt_token_ids"] = self.render(request)
        turn["token_ids"] = [*answer, *end]

    def _check_ids(self, turn: Turn) -> None:
        for ids, count in (("prompt_token_ids", "prompt_tokens"), ("token_ids", "completion_tokens")):
            counted = turn["usage"].get(count)
            found = turn[ids]  # type: ignore[literal-required]
            if counted is not None and counted != len(found):
                raise _unusable("ids_contradict_usage", f"{len(found)} {ids}, but {count} is {counted}")
            if found and not 0 <= min(found) <= max(found) < self.verifier.vocab_size:
                raise _unusable("ids_outside_vocabulary", f"{ids} has {max(found)}")

    def _has_tool_marker(self, turn: Turn) -> bool:
        if any(marker in (turn["reasoning"] or "") for marker in _TOOL_MARKERS):
            return True
        thinking = turn["token_ids"][: self.reasoning_length(turn)]
        return not self._tool_markers.isdisjoint(thinking)

    def _end_of_thinking(self, turn: Turn) -> int:
        ends = (i for i, token in enumerate(turn["token_ids"], start=1) if token in self._ends)
        return next(ends, 0)

    def _is_opened(self, turn: Turn) -> bool:
        marks = [i for i in turn["prompt_token_ids"][-_PREFILL:] if i in self._opens or i in self._ends]
        return bool(marks) and marks[-1] in self._opens

    @cached_property
    def _end_id(self) -> int:
        """The token that ends an answer in the template; Kimi's tokenizer names another one as its eos."""
        hello = Conversation("", "", (Message("user", "Hi"), Message("assistant", "Hello")))
        try:
            return chat.render(self.verifier, hello)[0]["input_ids"][-1]
        except Dropped as dropped:
            raise _unusable("not_retokenizable", f"the end of an answer is not known: {dropped}") from None

    @cached_property
    def _opens(self) -> frozenset[int]:
        return self._known(_OPENS_THINKING)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return self._known(_ENDS_THINKING)

    @cached_property
    def _tool_markers(self) -> frozenset[int]:
        return self._known(_TOOL_MARKERS)

    def _known(self, tokens: tuple[str, ...]) -> frozenset[int]:
        vocabulary = self.verifier.tokenizer.get_vocab()
        return frozenset(vocabulary[token] for token in tokens if token in vocabulary)


def repetition(token_ids: list[int]) -> float:
    """Share of an answer's 16-grams that occurred in it before; 0 for answers below 64 tokens."""
    if len(token_ids) < _SHORTEST_LOOP:
        return 0.0
    total = len(token_ids) - _NGRAM + 1
    return 1 - len({tuple(token_ids[i : i + _NGRAM]) for i in range(total)}) / total


def training_row(row: dict[str, Any], turn: int) -> TrainingRow:
    """A turn of a row of `responses.jsonl` as a training row: loss on what was generated.

    Args:
        row: `{id, source, turns, ...}`.
        turn: its number, from 0.
    """
    prompt, answer = row["turns"][turn]["prompt_token_ids"], row["turns"][turn]["token_ids"]
    return TrainingRow(
        input_ids=prompt + answer,
        loss_mask=[0] * len(prompt) + [1] * len(answer),
        seq_len=len(prompt) + len(answer),
        id=f"{row['id']}#{turn}",
        source=row["source"],
    )


class ResponseLog:
    """`responses.jsonl` and `failures.jsonl` of a folder: appended as they arrive, looked up by prompt id.

    Attributes:
        failed: prompt id -> its last row in `failures.jsonl`, for prompts without a response.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "responses.jsonl"
        self._failures = folder / "failures.jsonl"
        self._responses_log = atomic_io.JsonLog(self._path)
        self._failures_log = atomic_io.JsonLog(self._failures)
        self._offsets = dict(_index(self._path))
        self._end = self._path.stat().st_size
        self._rows = self._path.open("rb")
        failures = {row["id"]: row for row in atomic_io.read_json_lines(self._failures)}
        self.failed = {key: row for key, row in failures.items() if key not in self._offsets}

    def __enter__(self) -> ResponseLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._responses_log.close()
        self._failures_log.close()

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def model(self) -> str | None:
        """The served model's name in the oldest row, None without rows."""
        first = next(iter(self._offsets), None)
        return None if first is None else self.read(first)["model"]

    def add(self, row: dict[str, Any]) -> None:
        """Store a response; from here on SIGKILL does not lose it."""
        self._responses_log.append(row)
        self._offsets[row["id"]] = self._end
        self._end = self._path.stat().st_size
        self.failed.pop(row["id"], None)

    def fail(self, prompt_id: str, error: RequestFailed) -> None:
        """Store why a prompt has no response."""
        row = {"id": prompt_id, "reason": error.reason, "detail": error.detail, "attempts": error.attempts}
        self._failures_log.append(row)
        self.failed[prompt_id] = row

    def read(self, prompt_id: str) -> dict[str, Any]:
        """The stored row of a prompt.

        Raises:
            InputError: the line is damaged.
        """
        self._rows.seek(self._offsets[prompt_id])
        try:
            return json.loads(self._rows.readline())
        except ValueError as error:
            raise InputError(
                f"{self._path}: the row of {prompt_id} is damaged: {error}. Delete that line and run again: "
                "the prompt is then asked again."
            ) from None

    def forget_mended_failures(self) -> None:
        """Rewrite `failures.jsonl` without the prompts that were answered later."""
        self._failures_log.close()
        with atomic_io.replacing(self._failures) as file:
            for row in self.failed.values():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._failures_log = atomic_io.JsonLog(self._failures)


def _index(path: Path) -> Iterator[tuple[str, int]]:
    """Prompt ids and byte offsets. Rows are megabytes of ids, so a line is parsed only if it is not ours."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            match = _ID.match(line)
            try:
                yield (match[1].decode() if match else json.loads(line)["id"]), offset
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number} is no response: {error}. Delete that line."
                ) from None
            offset += len(line)


def _unusable(reason: str, detail: str) -> RequestFailed:
    return RequestFailed(reason, detail, attempts=1, permanent=True)
