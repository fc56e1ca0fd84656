"""Conversation -> exact token ids and loss mask, by the verifier's own chat template.

The mask is what rendered text shows: an answer is the text by which the rendered conversation up to and
including the answer exceeds the prompt that the server would have sent. Nothing is searched for by patterns.
A template rewrites earlier turns (Kimi's drops their reasoning), so each answer has a row of its own with the
prompt that the model would have seen; an answer whose mask cannot be proven is left out with its reason.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from common.conversations import Conversation, Dropped, Message
from common.dataset import TrainingRow
from common.verifier import Verifier

# The two names of one switch: Kimi's and DeepSeek's, and Qwen's. A template ignores what it does not know.
_DEFAULT: dict[str, Any] = {}
_ON = {"thinking": True, "enable_thinking": True}
_OFF = {"thinking": False, "enable_thinking": False}
# Rendered in place of an answer's texts, they show what of a turn is the template's own.
_ANSWER, _THOUGHT = "ANSWER7f3a9c1e", "THOUGHT7f3a9c1e"


def render(verifier: Verifier, conversation: Conversation) -> list[TrainingRow]:
    """One training row for each answer of a conversation.

    Args:
        verifier: its tokenizer, chat template and stop ids are used.
        conversation: with its answers.

    Returns:
        Rows in the order of the answers; `id` is the conversation's id, `#`, and the answer's number from 0.

    Raises:
        Dropped: an answer's mask cannot be proven.
    """
    rows = []
    for row in turns(verifier, conversation):
        if isinstance(row, Dropped):
            raise row
        rows.append(row)
    return rows


def turns(verifier: Verifier, conversation: Conversation) -> Iterator[TrainingRow | Dropped]:
    """As `render`, but an answer that cannot be used is yielded as its reason, and the others are kept."""
    positions = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    for turn, position in enumerate(positions):
        try:
            prompt, answer = _texts(verifier, conversation, position)
            prompt_ids, answer_ids = _ids(verifier, prompt, answer)
        except Dropped as dropped:
            yield dropped
            continue
        yield TrainingRow(
            input_ids=prompt_ids + answer_ids,
            loss_mask=[0] * len(prompt_ids) + [1] * len(answer_ids),
            seq_len=len(prompt_ids) + len(answer_ids),
            id=f"{conversation.id}#{turn}",
            source=conversation.source,
        )


def history_is_rewritten(rows: Sequence[TrainingRow]) -> bool:
    """Whether a later answer's prompt shows an earlier turn otherwise than the model wrote it.

    Args:
        rows: the answers of one conversation, in order.
    """
    pairs = itertools.pairwise(rows)
    return any(later["input_ids"][: row["seq_len"]] != row["input_ids"] for row, later in pairs)


# --------------------------------------------------------------------------------------------------------
# Text: which part of the rendered conversation the model wrote


def _texts(verifier: Verifier, conversation: Conversation, position: int) -> tuple[str, str]:
    """The prompt that the model would have seen, and what it would have written (and the template's rest)."""
    message = conversation.messages[position]
    history = conversation.messages[:position]
    if not history or history[-1].role not in ("user", "tool"):
        raise Dropped("answer_without_prompt", "no user message or tool result stands before it")
    if not message.content.strip() and not message.tool_calls:
        raise Dropped("empty_answer")
    if message.content.lstrip().startswith("<think>"):
        raise Dropped("unfinished_reasoning", "the answer opens <think> and does not close it")
    refusal = Dropped("prompt_not_a_prefix", "the rendered answer does not begin with the prompt")
    for mode in (_DEFAULT, _ON if message.reasoning else _OFF):
        try:
            return _texts_in_mode(verifier, conversation, position, mode)
        except Dropped as dropped:
            refusal = dropped
    raise refusal


def _texts_in_mode(
    verifier: Verifier, conversation: Conversation, position: int, mode: dict[str, Any]
) -> tuple[str, str]:
    message = conversation.messages[position]
    history = conversation.messages[:position]
    show = functools.partial(_rendered, verifier, conversation.tools, mode=mode)
    prompt = show(history, add_generation_prompt=True)
    whole = show((*history, message))
    stand_in = Message("assistant", _ANSWER, _THOUGHT if message.reasoning else None, message.tool_calls)
    before, found, tail = show((*history, stand_in)).partition(_ANSWER)
    start = len(prompt) if before.startswith(prompt) else _rewritten_start(before, prompt, show(history))
    head, answer = before[start:], whole[start:]
    if whole[:start] != before[:start]:
        raise Dropped("prompt_not_a_prefix", "the prompt depends on the answer's text")
    shows_thought = _THOUGHT in head
    head = _filled(head, message, answer)
    if not found or not answer.startswith(head) or not answer.endswith(tail):
        raise Dropped("answer_not_in_template", "the template does not show the answer's text")
    shown = answer[len(head) : len(answer) - len(tail)]
    if shown.strip() != message.content.strip():
        raise Dropped("answer_not_in_template", "the template alters the answer's text")
    if not all(call["function"]["name"] in tail for call in message.tool_calls or ()):
        raise Dropped("tool_call_not_in_template", "the template does not show the answer's tool calls")
    if message.reasoning is not None and not shows_thought:
        closing = _closing(verifier, conversation, position, prompt, head)
        return prompt, message.reasoning + closing + shown + tail
    if message.reasoning is None and head.strip():
        raise Dropped(
            "answer_not_alone", f"the template puts {head!r} before it, which the model did not say"
        )
    return prompt, answer


def _filled(head: str, message: Message, answer: str) -> str:
    """`head` with the reasoning in its place, stripped where the template strips it."""
    thought = message.reasoning or ""
    exact = head.replace(_THOUGHT, thought)
    return exact if answer.startswith(exact) else head.replace(_THOUGHT, thought.strip())


def _closing(verifier: Verifier, conversation: Conversation, position: int, prompt: str, head: str) -> str:
    """What closes the thinking in a template that drops the reasoning of a finished answer.

    Where the prompt without thinking is the prompt plus a closing mark, and a finished answer is shown as the
    prompt plus the same mark plus its text, the thinking belongs between the prompt and that mark.
    """
    history = conversation.messages[:position]
    instant = _rendered(verifier, conversation.tools, history, mode=_OFF, add_generation_prompt=True)
    closing = instant[len(prompt) :] if instant.startswith(prompt) else ""
    if not closing or head != closing:
        raise Dropped("reasoning_not_in_template", "the template has no place for the answer's reasoning")
    return closing


def _rewritten_start(before: str, prompt: str, history: str) -> int:
    """Where the answer begins in a rendering whose history is another than the prompt's.

    Kimi's template shows the reasoning of a tool call until the final answer follows, and drops it then. What
    the prompt adds to its own history opens the answer in both.

    Args:
        before: the rendering up to the answer's text.
        prompt: history and generation prompt.
        history: the same history without a generation prompt.
    """
    opening = prompt[len(history) :] if prompt.startswith(history) else ""
    position = before.rfind(opening) if opening else -1
    if position < 0:
        raise Dropped("prompt_not_a_prefix", "the rendered answer does not begin with the prompt")
    return position + len(opening)


def _rendered(
    verifier: Verifier,
    tools: list[Any] | None,
    messages: Sequence[Message],
    *,
    mode: dict[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    from jinja2 import TemplateError

    try:
        return verifier.tokenizer.apply_chat_template(  # type: ignore[return-value]
            [_for_template(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **mode,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Dropped("template_refuses", str(error)) from None


def _for_template(message: Message) -> dict[str, Any]:
    """As vLLM hands a message to a template: arguments as an object, the reasoning under both its names."""
    shown = message.to_openai()
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message.tool_calls
        ]
    return shown


# --------------------------------------------------------------------------------------------------------
# Ids: the server's for the prompt, a continuation of them for the answer


def _ids(verifier: Verifier, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt as the server makes them, and of the answer up to and including its end token."""
    tokenizer = verifier.tokenizer
    prompt_ids, whole_ids = tokenizer([prompt, prompt + answer], add_special_tokens=False)["input_ids"]
    if whole_ids[: len(prompt_ids)] == prompt_ids:
        answer_ids = whole_ids[len(prompt_ids) :]
    else:
        # A merge runs across the border ("<think>" + "</think>"): the model continues the prompt's own ids.
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(prompt_ids + answer_ids) != tokenizer.decode(whole_ids):
            raise Dropped("tokens_not_proven", "prompt and answer in ids do not make the rendered text")
    # SmolLM2's vocabulary has no tokens for some bytes and turns others into U+FFFD: such text never came
    # from the model. Spaces do not count: some tokenizers tidy them up on the way back.
    lost = Counter(prompt + answer) - Counter(str(tokenizer.decode(prompt_ids + answer_ids)))
    if lost.keys() - {" "}:
        raise Dropped("text_lost_in_tokens", "the tokenizer has no ids for some characters")
    return prompt_ids, _until_end(verifier, answer_ids)


def _until_end(verifier: Verifier, answer_ids: list[int]) -> list[int]:
    """Cut what the template adds after the answer (a line feed): the model stops at its end token."""
    stops, specials = _end_ids(verifier)
    ends = [i for i, token in enumerate(answer_ids) if token in stops]
    # A config may not list the token that the template ends turns with: then it is the last special one.
    ends = ends or [i for i, token in enumerate(answer_ids) if token in specials][-1:]
    if not ends:
        raise Dropped("no_end_token", "the template ends the answer without a special token")
    if str(verifier.tokenizer.decode(answer_ids[ends[0] + 1 :])).strip():
        raise Dropped("stop_token_inside_answer", "the answer's text holds a token that ends a turn")
    return answer_ids[: ends[0] + 1]


@functools.cache
def _end_ids(verifier: Verifier) -> tuple[frozenset[int], frozenset[int]]:
    return frozenset(verifier.stop_ids), frozenset(verifier.tokenizer.all_special_ids)
