"""ShareGPT, OpenAI, Alpaca and prompt-only rows become one `Conversation`; ids and keys by content.

A row is normalised or dropped with a reason; it is never guessed at. Roles are a whitelist: speculators 0.9.0
trains unknown roles (`developer`, `function`) as if the assistant had said them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import atomic_io
from common.errors import InputError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_LISTS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "text")


class Dropped(Exception):
    """A row or a turn that cannot be used.

    Attributes:
        reason: a short snake_case name, the same for each row with this defect; counts are kept by it.
        detail: what was found in this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class Message:
    """One message, its text exactly as in the source.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: text; empty for an answer that only calls tools.
        reasoning: the answer's thinking, None where the source has none.
        tool_calls: as in OpenAI's API, `function.arguments` being JSON text.
        tool_call_id: for role `tool`, the call that it answers.
        name: the speaker's or the tool's name.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The message as OpenAI's chat API takes it; absent fields are left out."""
        extras = {
            "reasoning": self.reasoning,
            "tool_calls": list(self.tool_calls) if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        present = {key: value for key, value in extras.items() if value is not None}
        return {"role": self.role, "content": self.content, **present}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A normalised row.

    Attributes:
        id: hash of the prompts (32 hex digits): the same on every machine, with answers or without.
        source: where the row comes from, e.g. `gsm8k`.
        messages: at least one is a user's.
        tools: declarations as in OpenAI's API.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None

    def to_row(self) -> dict[str, Any]:
        """A line of `prompts/*.jsonl`."""
        row = {"id": self.id, "source": self.source, "messages": [m.to_openai() for m in self.messages]}
        return {**row, "tools": self.tools} if self.tools else row

    @staticmethod
    def from_row(row: dict[str, Any]) -> Conversation:
        """Read a line of `prompts/*.jsonl` back; its id is kept as it is."""
        messages = []
        for message in row["messages"]:
            calls = message.get("tool_calls")
            messages.append(Message(**{**message, "tool_calls": tuple(calls) if calls else None}))
        return Conversation(row["id"], row["source"], tuple(messages), row.get("tools"))

    def prompts(self) -> Conversation:
        """Without answers: system and user messages, each user message to be answered in its turn.

        It ends before the first tool result: the model's own answer may call another tool or none.
        """
        return Conversation(self.id, self.source, _prompt_messages(self.messages), self.tools)

    @property
    def turns(self) -> int:
        """Number of answers."""
        return sum(message.role == "assistant" for message in self.messages)


def normalise(row: dict[str, Any], source: str) -> Conversation:
    """Turn a row of any known shape into a `Conversation`.

    Args:
        row: one row of a data set; unknown columns are ignored.
        source: the name to use where the row has no `source` of its own.

    Raises:
        Dropped: the row has no known shape, an unknown role, no user message, or content that is no text.
    """
    messages = _messages(row)
    tools = _tools(row.get("tools"))
    prompts = _prompt_messages(messages)
    if not prompts:
        raise Dropped("no_user_message", f"roles are {[m.role for m in messages]}")
    if any(m.role == "user" and not m.content.strip() for m in messages):
        raise Dropped("empty_user_message")
    opening = next(m for m in messages if m.role != "system")
    if opening.role != "user":
        raise Dropped("opens_without_user", f"the first message is the {opening.role}'s")
    own = row.get("source")
    named = _unicode(own) if isinstance(own, str) and own else source
    return Conversation(_content_id(prompts, tools), named, messages, tools)


def shape_of(row: dict[str, Any]) -> str:
    """The name of the row's shape and the columns that decided it, for the user's eyes.

    Raises:
        Dropped: no known column is filled, or it holds neither text nor messages.
    """
    column = _column(row)
    if column == "instruction":
        return "Alpaca (instruction/input/output)"
    value = row[column]
    if column in _PROMPTS and isinstance(value, str):
        return f"prompt only ({column})"
    value = _unpacked(value)
    if not isinstance(value, list):
        raise Dropped("messages_not_a_list", f"{column} is {type(value).__name__}")
    sharegpt = any(isinstance(message, dict) and "from" in message for message in value)
    return f"ShareGPT ({column}: from/value)" if sharegpt else f"OpenAI ({column}: role/content)"


def prompt_key(conversation: Conversation) -> bytes:
    """16 bytes, equal for prompts that differ in white space and case only."""
    turns = [[m.role, _folded(m.content)] for m in _prompt_messages(conversation.messages)]
    return _digest(json.dumps([turns, conversation.tools], sort_keys=True).encode())


def first_prompt_key(conversation: Conversation) -> bytes:
    """16 bytes of the first user message alone: the held-out split keeps one opening on one side."""
    first = next(m for m in conversation.messages if m.role == "user")
    return _digest(_folded(first.content).encode())


def read_prompts(path: Path) -> Iterator[Conversation]:
    """Yield the prompts of a JSON-lines file: ours, or rows of any known shape; answers are left out.

    Raises:
        InputError: the file is missing, a line is not JSON, or a row cannot be used.
    """
    for number, row in enumerate(atomic_io.read_json_lines(path), start=1):
        try:
            yield normalise(row, path.stem).prompts()
        except Dropped as dropped:
            raise InputError(
                f"{path}, row {number} is no prompt: {dropped}. Expected one of ShareGPT (conversations), "
                "OpenAI (messages), Alpaca (instruction) or a prompt, question or text. "
                "01_prepare_data.py drops such rows and says how many."
            ) from None


# --------------------------------------------------------------------------------------------------------
# Columns


def _column(row: dict[str, Any]) -> str:
    for column in (*_LISTS, "instruction", *_PROMPTS):
        if row.get(column):
            return column
    raise Dropped("no_known_columns", f"columns are {sorted(map(str, row))}")


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    column = _column(row)
    value = row[column]
    if column == "instruction":
        raw = _alpaca(row)
    elif column in _PROMPTS and isinstance(value, str):
        raw = [{"role": "user", "content": value}]
    else:
        raw = _unpacked(value)
    if not isinstance(raw, list):
        raise Dropped("messages_not_a_list", f"{column} is {type(value).__name__}")
    if row.get("system"):
        raw = [{"role": "system", "content": row["system"]}, *raw]
    messages = tuple(_message(message) for message in raw)
    # An empty system message is how ShareGPT rows say "none"; a template would render it as one.
    return tuple(m for m in messages if m.role != "system" or m.content.strip())


def _alpaca(row: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [_text(row[key]) for key in ("instruction", "input") if row.get(key)]
    prompt = {"role": "user", "content": "\n\n".join(parts)}
    return [prompt, {"role": "assistant", "content": row["output"]}] if row.get("output") else [prompt]


def _unpacked(value: Any) -> Any:
    """Undo what tables do to a list of messages: JSON in a string, or a list for each field."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        return _json(value, "messages_not_json")
    if isinstance(value, dict) and value and all(isinstance(field, list) for field in value.values()):
        return [dict(zip(value, fields, strict=False)) for fields in zip(*value.values(), strict=False)]
    return value


# --------------------------------------------------------------------------------------------------------
# Messages


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise Dropped("message_not_an_object", f"found {type(raw).__name__}")
    said = raw.get("role") or raw.get("from")
    if not isinstance(said, str):
        raise Dropped("message_without_role", f"keys are {sorted(map(str, raw))}")
    role = ROLES.get(said.strip().lower())
    if role is None:
        raise Dropped("unknown_role", repr(said))
    value = raw.get("content")
    content = _text(raw.get("value") if value is None else value, objects=role == "tool")
    if role != "assistant":
        call_id = _optional_text(raw.get("tool_call_id")) if role == "tool" else None
        return Message(role, content, tool_call_id=call_id, name=_optional_text(raw.get("name")))
    reasoning = _optional_text(raw.get("reasoning") or raw.get("reasoning_content"))
    if reasoning is None and content.lstrip().startswith("<think>") and "</think>" in content:
        # Distilled data sets keep the thinking in the text; a template would show it as part of the answer.
        thought, _, content = content.lstrip().removeprefix("<think>").partition("</think>")
        reasoning, content = thought.strip() or None, content.lstrip()
    return Message(role, content, reasoning, _tool_calls(raw.get("tool_calls")))


def _text(value: Any, objects: bool = False) -> str:
    """Text, or the text parts of a list joined by line feeds, as vLLM joins them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _unicode(value)
    parts = value if isinstance(value, list) else [value]
    if all(isinstance(part, str) or _is_text_part(part) for part in parts):
        return _unicode("\n".join(part if isinstance(part, str) else part["text"] for part in parts))
    if objects:
        return _dumps(value)
    kinds = [part.get("type", "object") if isinstance(part, dict) else type(part).__name__ for part in parts]
    raise Dropped("content_not_text", f"found {', '.join(map(str, kinds[:5]))}")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _optional_text(value: Any) -> str | None:
    return _text(value) or None


def _tool_calls(value: Any) -> tuple[dict[str, Any], ...] | None:
    calls = _json(value, "tool_calls_not_json") if isinstance(value, str) and value else value
    if not calls:
        return None
    if not isinstance(calls, list):
        raise Dropped("tool_calls_not_a_list", f"found {type(calls).__name__}")
    return tuple(_tool_call(call) for call in calls)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Dropped("tool_call_without_name", f"found {type(call).__name__}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        _json(arguments, "tool_arguments_not_json")
        arguments = _unicode(arguments)
    else:
        arguments = _dumps(arguments or {})
    named = {"name": _unicode(function["name"]), "arguments": arguments}
    call_id = {"id": _unicode(call["id"])} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": named}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _json(value, "tools_not_json") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Dropped("tools_not_a_list_of_objects")
    _dumps(tools)
    return tools


def _prompt_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    kept: list[Message] = []
    for message in messages:
        if message.role == "tool":
            break
        if message.role != "assistant":
            kept.append(message)
    while kept and kept[-1].role != "user":
        kept.pop()
    return tuple(kept)


# --------------------------------------------------------------------------------------------------------
# Text and hashes


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Dropped(reason, str(error)) from None


def _dumps(value: Any) -> str:
    try:
        return _unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Dropped("not_json", str(error)) from None


def _unicode(text: str) -> str:
    """Refuse lone surrogates: JSON may hold them, UTF-8 files and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Dropped("not_unicode", error.reason) from None
    return text


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _content_id(prompts: tuple[Message, ...], tools: list[dict[str, Any]] | None) -> str:
    content = [[m.role, m.content, m.name] for m in prompts]
    return _digest(json.dumps([content, tools], sort_keys=True).encode()).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
