"""Generation: a conversation answered turn by turn, and a watch that stops a run gone wrong."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from common import log
from common.conversations import Conversation
from common.errors import InputError, StageError
from common.inference_pool import InferencePool, RequestFailed
from common.responses import Reader, Turn

FIRST = 32  # responses within which a wrong thinking mode must show

_FEWEST = 20  # prompts before a failure rate means anything
_LOG = log.get("generation")


class Generator:
    """Answers a conversation turn by turn, its own answers being the history.

    Args:
        pool: where requests go.
        reader: makes turns out of responses.
        request: the fields that all requests share.
    """

    def __init__(self, pool: InferencePool, reader: Reader, request: dict[str, Any]) -> None:
        self._pool = pool
        self._reader = reader
        self._request = request
        self._template_checked = False

    async def answer(self, conversation: Conversation) -> dict[str, Any]:
        """A row of `responses.jsonl`.

        Later turns are left out where an answer cannot be built upon (cut, empty, waiting for a tool), or
        where the server refuses the next prompt for good, as one that has become too long.

        Raises:
            RequestFailed: a turn got no answer, and it was the first or might get one another time.
        """
        turns: list[Turn] = []
        history: list[dict[str, Any]] = []
        stopped = None
        for message in conversation.messages:
            if turns and (stopped := self._dead_end(turns[-1])):
                break
            history.append(message.to_openai())
            if message.role != "user":
                continue
            try:
                turns.append(await self._turn(history, conversation.tools))
            except RequestFailed as error:
                if not (turns and error.permanent):
                    raise
                stopped = error.reason
                break
            history.append(self._reader.as_history(turns[-1]))
        return {
            "id": conversation.id,
            "source": conversation.source,
            "model": self._request["model"],
            "turns": turns,
            "truncated": any(turn["finish_reason"] == "length" for turn in turns),
            "stopped": stopped,
        }

    async def _turn(self, history: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Turn:
        request = {**self._request, "messages": list(history), **({"tools": tools} if tools else {})}
        begun = time.monotonic()
        response = await self._pool.chat(**request)
        turn = self._reader.turn(request, response, time.monotonic() - begun)
        if not self._template_checked:
            self._template_checked = True
            self._check_template(request, turn["prompt_token_ids"])
        return turn

    def _dead_end(self, turn: Turn) -> str | None:
        if turn["tool_calls"]:
            return "tool_calls"
        return next((flag for flag in self._reader.flags(turn) if flag in ("truncated", "empty")), None)

    def _check_template(self, request: dict[str, Any], found: list[int]) -> None:
        """Say so when the server's prompt is not the verifier's: it may serve another model."""
        try:
            expected = self._reader.render(request)
        except RequestFailed as error:
            _LOG.warning("the server's prompts cannot be compared with the verifier's: %s", error.detail)
            return
        if found == expected:
            return
        pairs = enumerate(zip(found, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
        _LOG.warning(
            "the server's prompt differs from the verifier's chat template from token %d on (%s, here %s). "
            "If it serves another model or template than --verifier, stop: no later stage would notice.",
            *(at, found[at : at + 4], expected[at : at + 4]),
        )


class Watch:
    """The bar, and the reasons to stop a run that wastes the server's time.

    Args:
        pool: for its counters.
        reader: tells whether a turn thinks.
        total: prompts to do.
        thinking: `on`, `off` or `default`.
        thinking_key: the template's variable, for the error.
        max_failure_rate: share of prompts.
    """

    def __init__(
        self,
        pool: InferencePool,
        reader: Reader,
        total: int,
        thinking: str,
        thinking_key: str,
        max_failure_rate: float,
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._mode = (thinking, thinking_key)
        self._max_failure_rate = max_failure_rate
        self._first: list[dict[str, Any]] | None = []
        self._answers = self._tokens = 0
        self._reasons: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._bar = log.bar(total, unit="prompts", description="answers")

    def answered(self, row: dict[str, Any]) -> None:
        """Count a row.

        Raises:
            StageError: --thinking is not what arrives.
        """
        self._tokens += sum(len(turn["token_ids"]) for turn in row["turns"])
        self._answers += 1
        self._advance()
        if self._first is not None:
            self._first.append(row)
            if len(self._first) == FIRST:
                check_thinking(*self._mode, self._reader, self._first)
                self._first = None

    def failed(self, error: RequestFailed) -> None:
        """Count a failure.

        Raises:
            StageError: there are too many.
        """
        self._reasons[error.reason] += 1
        self._advance()
        failures = self._reasons.total()
        tried = failures + self._answers
        if tried >= _FEWEST and failures > self._max_failure_rate * tried:
            raise StageError(
                f"{failures} of {tried} prompts failed ({counted(self._reasons)}; the last one: "
                f"{textwrap.shorten(error.detail, 300)}), more than --max-failure-rate "
                f"{self._max_failure_rate}. What arrived is stored. Mend the server or the request, then run "
                "again with --retry-failed."
            )

    def close(self) -> None:
        """End the bar and say how fast it went."""
        self._bar.close()
        seconds = time.monotonic() - self._begun
        _LOG.info(
            "%d answers, %s output tokens in %s = %.0f tokens/s; %d retries, %d failures",
            *(self._answers, log.human_count(self._tokens), log.human_seconds(seconds)),
            *(self._tokens / seconds, self._pool.stats.retries, self._reasons.total()),
        )

    def _advance(self) -> None:
        seconds = max(1e-9, time.monotonic() - self._begun)
        stats = self._pool.stats
        state = (
            f"{log.human_count(self._tokens / seconds)} tokens/s, "
            f"{stats.in_flight} in flight, {stats.retries} retries, {self._reasons.total()} failures"
        )
        self._bar.set_postfix_str(state, refresh=False)
        self._bar.update()


def check_thinking(thinking: str, key: str, reader: Reader, rows: list[dict[str, Any]]) -> None:
    """Compare the thinking mode that was asked for with the first answers.

    Args:
        thinking: `on`, `off` or `default`.
        key: the template's variable, for the error.
        reader: tells whether a turn thinks.
        rows: the first rows of `responses.jsonl`.

    Raises:
        StageError: asked for and absent from all, or refused and in more than half.
    """
    count = sum(any(reader.thinks(turn) for turn in row["turns"]) for row in rows)
    if thinking == "on" and rows and not count:
        problem = f"none of the first {len(rows)} answers has reasoning, neither as a field nor as think ids"
    elif thinking == "off" and 2 * count > len(rows):
        problem = f"{count} of the first {len(rows)} answers think all the same"
    else:
        return
    raise StageError(
        f"--thinking {thinking}, but {problem}. The drafter would learn another mode than the one that is "
        f"served, without an error. Does the template read {key!r} (--thinking-key)? Has the server its "
        "--reasoning-parser? Then run again with --overwrite."
    )


def served_name(models: list[dict[str, Any]], asked: str | None, verifier_name: str) -> str:
    """The model name for requests.

    Args:
        models: the server's list, `id` each.
        asked: --server-model.
        verifier_name: the choice where the server has it.

    Raises:
        InputError: the server has no such model.
    """
    served = [entry["id"] for entry in models]
    if asked is None and len(served) == 1 and served[0] != verifier_name:
        _LOG.warning("the server's only model is %s; taken to be %s", served[0], verifier_name)
        return served[0]
    name = asked or verifier_name
    if served and name not in served:
        raise InputError(f"the server has no model {name!r}, only {', '.join(served)}: pass --server-model")
    return name


def counted(reasons: Iterable[str] | Counter[str]) -> str:
    """`3 stop, 1 length`, most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in Counter(reasons).most_common()) or "none"
