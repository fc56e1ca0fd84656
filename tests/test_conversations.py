"""Rows of every shape, roles, ids, and what malformed rows come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import conversations
from common.conversations import Conversation, Dropped, Message
from common.errors import InputError

HI = {"role": "user", "content": "Hi"}


def talk(*messages: Any, **row: Any) -> Conversation:
    return conversations.normalise({"messages": list(messages), **row}, "file")


def dropped(row: dict[str, Any]) -> str:
    with pytest.raises(Dropped) as caught:
        conversations.normalise(row, "file")
    return caught.value.reason


# --- shapes


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            "ShareGPT (conversations: from/value)",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
            "OpenAI (messages: role/content)",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                          {"role": "assistant", "content": "Hello"}]},
            "OpenAI (messages: role/content)",
        ),
        (
            {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'},
            "OpenAI (messages: role/content)",
        ),
        (
            {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello"]}},
            "ShareGPT (conversations: from/value)",
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "Alpaca (instruction/input/output)"),
    ],
)  # fmt: skip
def test_every_shape_with_answers_becomes_the_same_conversation(row: dict[str, Any], shape: str) -> None:
    found = conversations.normalise(row, "file")
    assert found.messages == (Message("user", "Hi"), Message("assistant", "Hello"))
    assert conversations.shape_of(row) == shape


@pytest.mark.parametrize("column", ["prompt", "question", "text"])
def test_a_prompt_alone_is_a_user_message(column: str) -> None:
    found = conversations.normalise({column: "Hi", "messages": None, "answer": "x"}, "file")
    assert found.messages == (Message("user", "Hi"),)
    assert conversations.shape_of({column: "Hi"}) == f"prompt only ({column})"


def test_a_prompt_that_begins_like_json_is_still_a_prompt() -> None:
    assert conversations.normalise({"prompt": "[1, 2"}, "file").messages == (Message("user", "[1, 2"),)
    assert conversations.shape_of({"prompt": "[1, 2"}) == "prompt only (prompt)"


def test_an_alpaca_input_follows_its_instruction_after_an_empty_line() -> None:
    found = conversations.normalise({"instruction": "Add.", "input": "2, 3", "output": "5"}, "file")
    assert found.messages == (Message("user", "Add.\n\n2, 3"), Message("assistant", "5"))


def test_messages_win_over_a_prompt_column_beside_them() -> None:
    found = conversations.normalise({"prompt": "no", "messages": [HI], "prompt_id": "7"}, "file")
    assert found.messages == (Message("user", "Hi"),)


def test_a_system_column_comes_first_and_an_empty_system_message_is_none() -> None:
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]}
    assert conversations.normalise(row, "file").messages[0] == Message("system", "Be brief.")
    assert talk({"role": "system", "content": ""}, HI).messages == (Message("user", "Hi"),)


def test_the_rows_own_source_goes_before_the_files_name() -> None:
    assert talk(HI, source="gsm8k").source == "gsm8k"
    assert talk(HI, source=None).source == "file"


# --- roles


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"),
        ("chatgpt", "assistant"), ("bing", "assistant"), ("model", "assistant"), ("system", "system"),
        ("developer", "system"), ("tool", "tool"), ("function", "tool"), ("observation", "tool"),
        ("GPT", "assistant"), (" Human ", "user"),
    ],
)  # fmt: skip
def test_aliases_of_a_role_are_known(said: str, role: str) -> None:
    found = talk(HI, {"role": said, "content": "x"}, HI)
    assert found.messages[1].role == role


@pytest.mark.parametrize("role", ["narrator", "function_call", "assistant2", "ipython", "bot "])
def test_an_unknown_role_drops_the_row_and_is_never_an_assistant(role: str) -> None:
    # speculators 0.9.0 takes whatever it does not know for the assistant and trains it.
    assert dropped({"messages": [HI, {"role": role, "content": "x"}]}) == "unknown_role"


# --- content of mixed types


def test_tool_arguments_are_one_text_whether_they_came_as_text_or_object() -> None:
    as_object = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    as_text = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answers = [
        talk(HI, {"role": "assistant", "content": None, "tool_calls": [c]}) for c in (as_object, as_text)
    ]
    assert answers[0].messages[1] == answers[1].messages[1]
    assert answers[0].messages[1].to_openai() == {"role": "assistant", "content": "", "tool_calls": [as_text]}


def test_both_names_of_reasoning_are_read() -> None:
    for key in ("reasoning", "reasoning_content"):
        assert talk(HI, {"role": "assistant", "content": "x", key: "hm"}).messages[1].reasoning == "hm"


def test_a_tool_result_may_be_an_object_and_keeps_its_call_id() -> None:
    found = talk(HI, {"role": "tool", "content": {"r": 4}, "tool_call_id": "c:0"})
    assert found.messages[1] == Message("tool", '{"r": 4}', tool_call_id="c:0")


def test_text_parts_are_joined_by_line_feeds_as_vllm_joins_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert talk({"role": "user", "content": parts}).messages[0].content == "a\nb"


def test_tools_may_come_as_json_text() -> None:
    assert talk(HI, tools='[{"type": "function"}]').tools == [{"type": "function"}]
    assert talk(HI, tools="").tools is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no_known_columns"),
        ({"messages": []}, "no_known_columns"),
        ({"messages": "[broken"}, "messages_not_json"),
        ({"messages": {"role": "user"}}, "messages_not_a_list"),
        ({"messages": ["Hi"]}, "message_not_an_object"),
        ({"messages": [{"content": "Hi"}]}, "message_without_role"),
        ({"messages": [{"role": 7, "content": "Hi"}]}, "message_without_role"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no_user_message"),
        ({"messages": [{"role": "assistant", "content": "Welcome"}, HI]}, "opens_without_user"),
        ({"messages": [{"role": "user", "content": "  "}]}, "empty_user_message"),
        ({"messages": [{"role": "user", "content": None}]}, "empty_user_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content_not_text"),
        ({"messages": [{"role": "user", "content": 7}]}, "content_not_text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not_unicode"),
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "tool_call_without_name",
        ),
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "tool_arguments_not_json",
        ),
        ({"messages": [HI], "tools": "nonsense"}, "tools_not_json"),
        ({"messages": [HI], "tools": [7]}, "tools_not_a_list_of_objects"),
        ({"messages": [HI], "tools": [{"x": float("nan")}]}, "not_json"),
    ],
)
def test_a_malformed_row_is_dropped_with_its_reason(row: dict[str, Any], reason: str) -> None:
    assert dropped(row) == reason


# --- ids and keys


def test_an_id_is_the_same_on_every_machine_and_does_not_depend_on_answers_or_source() -> None:
    wanted = "d00f8fc9d69434ec41d8453785bcab68"
    assert talk(HI).id == wanted
    assert talk(HI, {"role": "assistant", "content": "Hello"}, source="x").id == wanted
    assert conversations.normalise({"conversations": [{"from": "human", "value": "Hi"}]}, "y").id == wanted
    assert talk({"role": "user", "content": "hi"}).id != wanted
    assert talk(HI, tools=[{"type": "function"}]).id != wanted


def test_prompts_that_differ_in_white_space_and_case_have_one_key() -> None:
    one = talk({"role": "user", "content": "What is  2+2?\n"})
    other = talk({"role": "user", "content": "what is 2+2?"}, {"role": "assistant", "content": "4"})
    assert conversations.prompt_key(one) == conversations.prompt_key(other)
    assert len(conversations.prompt_key(one)) == 16
    assert one.id != other.id


def test_system_and_later_prompts_count_for_duplicates_but_not_for_the_opening() -> None:
    plain = talk(HI)
    others = [talk({"role": "system", "content": "Be brief."}, HI), talk(HI, HI)]
    assert all(conversations.prompt_key(c) != conversations.prompt_key(plain) for c in others)
    assert all(conversations.first_prompt_key(c) == conversations.first_prompt_key(plain) for c in others)


# --- prompts without answers


def test_prompts_leave_answers_out_and_end_before_a_tool_result() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    whole = talk(
        {"role": "system", "content": "S"}, HI, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Thanks"},
    )  # fmt: skip
    prompts = whole.prompts()
    assert [m.content for m in prompts.messages] == ["S", "Hi", "Look it up."]
    assert prompts.id == whole.id


def test_read_prompts_takes_our_file_and_any_shape_and_names_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    ours = talk(HI, source="ours").to_row()
    rows = [ours, {"question": "2+2?", "answer": "4"}, {"messages": [HI, {"role": "gpt", "content": "x"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(conversations.read_prompts(file))
    assert [c.to_row()["messages"] for c in found] == [[HI], [{"role": "user", "content": "2+2?"}], [HI]]
    assert [c.source for c in found] == ["ours", "mixed", "mixed"]
    assert found[0].id == ours["id"]
    file.write_text('{"question": "a"}\n{"messages": [{"role": "narrator", "content": "x"}]}\n')
    with pytest.raises(InputError, match=r"mixed\.jsonl, row 2 is no prompt: unknown_role: 'narrator'"):
        list(conversations.read_prompts(file))


# --- properties: whatever a row holds, it is normalised soundly or dropped with a reason

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["[", "{}", "[{}]", "null", "<think>", "</think>", "\ud800", " ", "<think>a</think>b"])
)  # fmt: skip
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "name", "function", "arguments", "id", "from"]), inner
        )
    ),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries(
    {},
    optional={"id": JUNK, "function": st.fixed_dictionaries({"name": JUNK, "arguments": JUNK}), "name": JUNK},
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from([*conversations.ROLES, "narrator", "USER", ""]) | JUNK,
        "from": st.sampled_from(["human", "gpt", "function_call"]) | JUNK,
        "content": st.text(max_size=20) | JUNK,
        "value": st.text(max_size=20) | JUNK,
        "reasoning": JUNK,
        "reasoning_content": JUNK,
        "tool_calls": st.lists(CALLS, max_size=2) | JUNK,
        "tool_call_id": JUNK,
        "name": JUNK,
    },
)
LIKELY = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "gpt"]), st.text()
)
TALKS = st.lists(LIKELY | MESSAGES | JUNK, max_size=4)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("messages", "conversations"), TALKS | JUNK),
        **dict.fromkeys(("prompt", "question", "text", "instruction", "input", "output"), JUNK),
        **dict.fromkeys(("system", "source", "tools"), JUNK),
    },
)


@settings(max_examples=250, deadline=None)
@given(row=ROWS)
def test_any_row_is_dropped_with_a_reason_or_is_a_sound_conversation(row: dict[str, Any]) -> None:
    try:
        found = conversations.normalise(row, "file")
    except Dropped:
        return
    assert {m.role for m in found.messages} <= {"system", "user", "assistant", "tool"}
    opening = next(m for m in found.messages if m.role != "system")
    assert opening.role == "user"
    assert opening.content.strip()
    line = json.dumps(found.to_row(), ensure_ascii=False, allow_nan=False).encode()
    assert Conversation.from_row(json.loads(line)) == found
    assert conversations.shape_of(row)
    prompts = found.prompts()
    assert {m.role for m in prompts.messages} <= {"system", "user"}
    assert prompts.messages[-1].role == "user"


@settings(max_examples=120, deadline=None)
@given(row=ROWS)
def test_normalising_a_normalised_row_changes_nothing(row: dict[str, Any]) -> None:
    try:
        found = conversations.normalise(row, "file")
    except Dropped:
        return
    assert conversations.normalise(found.to_row(), "other") == found
    assert conversations.normalise(found.prompts().to_row(), "other") == found.prompts()


@settings(max_examples=120, deadline=None)
@given(
    supervised=st.lists(st.sampled_from(["user", "assistant"]), max_size=4),
    role=st.text(max_size=12).filter(lambda text: text.strip().lower() not in conversations.ROLES),
)
def test_no_unknown_role_ever_comes_through(supervised: list[str], role: str) -> None:
    rest = [{"role": known, "content": "x"} for known in supervised]
    with pytest.raises(Dropped):
        talk(HI, *rest, {"role": role, "content": "x"})
