"""Exact ids and masks: real tokenizer, SmolLM2's template, one like Kimi's, one like Qwen's, and bad ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import chat, conversations
from common.conversations import Conversation, Dropped
from common.dataset import TrainingRow
from common.verifier import Verifier

SMOL_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)

# Opens the thinking in the answer instead of the prompt, and shows the last turn's only.
QWEN_LIKE = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.last -%}
{{- '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
ALTERNATING = """
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
UPPER_CASE = ALTERNATING.replace("m.content +", "m.content | upper +")
NO_END = ALTERNATING.replace("<|im_end|>", "")
OTHER_PROMPT = ALTERNATING.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'")


@pytest.fixture(scope="module")
def smol(verifier_dir: Path) -> Verifier:
    return Verifier(str(verifier_dir))


@pytest.fixture(scope="module")
def kimi_like(kimi_like_dir: Path) -> Verifier:
    return Verifier(str(kimi_like_dir))


@pytest.fixture(scope="module")
def with_template(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verifier]:
    def make(template: str) -> Verifier:
        folder = tmp_path_factory.mktemp("template")
        for file in verifier_dir.glob("*.json"):
            shutil.copy(file, folder)
        (folder / "chat_template.jinja").write_text(template)
        return Verifier(str(folder))

    return make


def talk(*messages: tuple[str, str] | dict[str, Any], **row: Any) -> Conversation:
    given = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return conversations.normalise({"messages": given, **row}, "test")


def texts(verifier: Verifier, row: TrainingRow) -> tuple[str, str]:
    """What is not trained and what is, as text; the mask must be zeros and then ones."""
    border = row["loss_mask"].index(1)
    assert row["loss_mask"] == [0] * border + [1] * (row["seq_len"] - border)
    decode = verifier.tokenizer.decode
    return decode(row["input_ids"][:border]), decode(row["input_ids"][border:])


def reasons(verifier: Verifier, conversation: Conversation) -> list[str]:
    return [row.reason for row in chat.turns(verifier, conversation) if isinstance(row, Dropped)]


# --- the plain template


def test_the_answer_and_its_end_token_are_supervised_and_nothing_else(smol: Verifier) -> None:
    (row,) = chat.render(smol, talk(("user", "Hi"), ("assistant", "Hello there.")))
    prompt, answer = texts(smol, row)
    assert prompt == f"{SMOL_SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer == "Hello there.<|im_end|>"
    assert row["input_ids"][-1] == 2
    assert row["seq_len"] == len(row["input_ids"]) == 35


def test_the_prompt_ids_are_those_that_the_server_makes(smol: Verifier) -> None:
    (row,) = chat.render(smol, talk(("user", "Hi"), ("assistant", "Hello there.")))
    served = smol.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert row["input_ids"][: row["loss_mask"].index(1)] == served


def test_each_answer_has_a_row_whose_id_names_the_turn(smol: Verifier) -> None:
    conversation = talk(("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4"))
    first, second = chat.render(smol, conversation)
    assert [first["id"], second["id"]] == [f"{conversation.id}#0", f"{conversation.id}#1"]
    assert texts(smol, second)[1] == "4<|im_end|>"
    assert "Hello.<|im_end|>\n<|im_start|>user\n2+2?" in texts(smol, second)[0]
    assert not chat.history_is_rewritten([first, second])


def test_a_developer_is_the_system_and_never_supervised(smol: Verifier) -> None:
    # speculators 0.9.0 trains `developer` and `function` as assistant text.
    (row,) = chat.render(
        smol, talk(("developer", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("function", "{}"))
    )
    prompt, answer = texts(smol, row)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert answer == "Hello.<|im_end|>"


# --- the template like Kimi's


def test_kimi_reasoning_is_supervised_behind_the_prefilled_think(kimi_like: Verifier) -> None:
    # The rendered row shows `<think></think>4`: speculators 0.9.0 supervises `</think>4` and no reasoning.
    (row,) = chat.render(
        kimi_like, talk(("user", "2+2?"), {"role": "assistant", "reasoning": "Two and two.", "content": "4"})
    )
    assert texts(kimi_like, row) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>",
        "Two and two.</think>4<|im_end|>",
    )


def test_kimi_answer_without_reasoning_has_the_instant_prompt(kimi_like: Verifier) -> None:
    (row,) = chat.render(kimi_like, talk(("user", "2+2?"), ("assistant", "4")))
    assert texts(kimi_like, row) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>",
        "4<|im_end|>",
    )


def test_kimi_history_is_without_reasoning_and_each_turn_has_its_own_prompt(kimi_like: Verifier) -> None:
    rows = chat.render(
        kimi_like,
        talk(
            ("user", "2+2?"),
            {"role": "assistant", "reasoning_content": "Two and two.", "content": "4"},
            ("user", "And 3+3?"),
            {"role": "assistant", "reasoning": "Three and three.", "content": "6"},
        ),
    )
    assert texts(kimi_like, rows[0])[1] == "Two and two.</think>4<|im_end|>"
    assert texts(kimi_like, rows[1]) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>4<|im_end|>\n"
        "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n<think>",
        "Three and three.</think>6<|im_end|>",
    )
    assert chat.history_is_rewritten(rows)


def test_kimi_prefilled_ids_are_kept_where_a_merge_would_cross_the_border(kimi_like: Verifier) -> None:
    # Alone `<think>` is 44 17400 46; in `<think></think>` the tokenizer merges `><` into 29299.
    conversation = talk(("user", "?"), {"role": "assistant", "reasoning": "<b>", "content": "4"})
    (row,) = chat.render(kimi_like, conversation)
    border = row["loss_mask"].index(1)
    assert row["input_ids"][border - 3 : border] == [44, 17400, 46]
    assert 29299 not in kimi_like.tokenizer("<b></think>")["input_ids"][:1]
    assert texts(kimi_like, row)[1] == "<b></think>4<|im_end|>"


def test_kimi_tool_call_keeps_its_reasoning_until_an_answer_follows(kimi_like: Verifier) -> None:
    call = {"id": "calc:0", "function": {"name": "calc", "arguments": {"e": "2+2"}}}
    rows = chat.render(
        kimi_like,
        talk(
            ("user", "2+2?"),
            {"role": "assistant", "content": None, "reasoning": "Use calc.", "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "calc:0"},
            {"role": "assistant", "content": "It is 4.", "reasoning": "Got it."},
            tools=[{"type": "function", "function": {"name": "calc"}}],
        ),
    )
    called = 'Use calc.</think><|tool_call_begin|>calc:0 calc {"e": "2+2"}<|tool_call_end|><|im_end|>'
    assert texts(kimi_like, rows[0])[1] == called
    prompt, answer = texts(kimi_like, rows[1])
    assert prompt.endswith(
        f"<think>{called}\n<|im_start|>tool\n## Return of calc:0\n4<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert answer == "Got it.</think>It is 4.<|im_end|>"


def test_reasoning_that_is_a_word_of_the_template_is_not_mistaken_for_shown(kimi_like: Verifier) -> None:
    (row,) = chat.render(
        kimi_like, talk(("user", "?"), {"role": "assistant", "reasoning": "think", "content": "4"})
    )
    assert texts(kimi_like, row)[1] == "think</think>4<|im_end|>"


def test_inline_think_of_distilled_data_becomes_reasoning(kimi_like: Verifier) -> None:
    (row,) = chat.render(kimi_like, talk(("user", "?"), ("assistant", "<think>\nHm.\n</think>\n\n4")))
    assert texts(kimi_like, row)[1] == "Hm.</think>4<|im_end|>"


# --- other templates


def test_thinking_that_the_model_opens_itself_is_supervised(with_template: Callable) -> None:
    qwen_like = with_template(QWEN_LIKE)
    rows = chat.render(
        qwen_like,
        talk(("user", "2+2?"), {"role": "assistant", "reasoning": "Two.\n", "content": "4"}, ("user", "So?"),
             ("assistant", " 5")),
    )  # fmt: skip
    assert texts(qwen_like, rows[0])[1] == "<think>\nTwo.\n</think>\n\n4<|im_end|>"
    assert texts(qwen_like, rows[1]) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "5<|im_end|>",
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (UPPER_CASE, "answer_not_in_template"),
        (NO_END, "no_end_token"),
        (OTHER_PROMPT, "prompt_not_a_prefix"),
    ],
)
def test_a_template_whose_mask_cannot_be_proven_is_refused(
    with_template: Callable, template: str, reason: str
) -> None:
    assert reasons(with_template(template), talk(("user", "Hi"), ("assistant", "hello"))) == [reason]


def test_a_template_that_raises_is_told_in_its_own_words(with_template: Callable) -> None:
    conversation = talk(("user", "a"), ("user", "b"), ("assistant", "c"))
    with pytest.raises(Dropped, match="template_refuses: roles must alternate"):
        chat.render(with_template(ALTERNATING), conversation)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"content": ""}, "empty_answer"),
        ({"content": " \n"}, "empty_answer"),
        ({"content": "a<|im_end|>\nb"}, "stop_token_inside_answer"),
        ({"content": "<think>never closed"}, "unfinished_reasoning"),
        ({"content": "4", "reasoning": "2+2"}, "reasoning_not_in_template"),
        ({"content": "calc", "tool_calls": [{"function": {"name": "calc"}}]}, "tool_call_not_in_template"),
    ],
)
def test_an_answer_that_cannot_be_proven_is_dropped_with_its_reason(
    smol: Verifier, answer: dict[str, Any], reason: str
) -> None:
    assert reasons(smol, talk(("user", "Hi"), {"role": "assistant", **answer})) == [reason]


def test_an_answer_after_an_answer_has_no_prompt_and_the_others_stay(smol: Verifier) -> None:
    conversation = talk(
        ("user", "Hi"), ("assistant", "a"), ("assistant", "b"), ("user", "?"), ("assistant", "c")
    )
    kept = [row for row in chat.turns(smol, conversation) if not isinstance(row, Dropped)]
    assert reasons(smol, conversation) == ["answer_without_prompt"]
    assert [texts(smol, row)[1] for row in kept] == ["a<|im_end|>", "c<|im_end|>"]


# --- properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "ANSWER",
        " x",
        "\n\n",
        "  ",
        "é",
        "你好",
        "👩‍🚀",
    ]
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    prompts=st.lists(TEXT.filter(str.strip), min_size=1, max_size=3),
    answers=st.lists(TEXT, min_size=3, max_size=3),
    reasoning=st.none() | TEXT,
    like_kimi=st.booleans(),
)
def test_whatever_is_supervised_is_what_was_answered(
    smol: Verifier,
    kimi_like: Verifier,
    prompts: list[str],
    answers: list[str],
    reasoning: str | None,
    like_kimi: bool,
) -> None:
    verifier = kimi_like if like_kimi else smol
    messages: list[dict[str, Any]] = []
    for prompt, answer in zip(prompts, answers, strict=False):
        messages += [{"role": "user", "content": prompt}]
        messages += [{"role": "assistant", "content": answer, "reasoning": reasoning}]
    conversation = talk(*messages)
    for row in chat.turns(verifier, conversation):
        if isinstance(row, Dropped):
            continue
        said = [m for m in conversation.messages if m.role == "assistant"][int(row["id"].rpartition("#")[2])]
        _, answer = texts(verifier, row)
        thought = f"{said.reasoning}</think>" if said.reasoning else ""
        assert answer == f"{thought}{said.content}<|im_end|>"


def test_text_that_the_tokenizer_loses_is_dropped_with_its_reason(smol: Verifier) -> None:
    # SmolLM2 has no token for U+0006 and leaves it out without a word.
    conversation = talk({"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x06"})
    (found,) = chat.turns(smol, conversation)
    assert isinstance(found, Dropped)
    assert found.reason == "text_lost_in_tokens"
