"""common/evaluation.py: measured runs become results.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common import evaluation
from common.evaluation import Answer, Run

PROMPTS = 12


def answers(steps: list[int], *, sources: tuple[str, ...] = ("math",), tokens: int = 40) -> list[Answer]:
    """Prompt i answers with token i again and again and accepts `steps`, then nothing in up to two more."""
    return [
        Answer(
            id=f"p{i}",
            source=sources[i % len(sources)],
            token_ids=[[i] * tokens],
            accepted_by_step=[steps + [0] * (i % 3)],
            thinking=[0],
        )
        for i in range(PROMPTS)
    ]


def a_run(drafter: str | None, found: list[Answer], **changes: Any) -> Run:
    k = 0 if drafter is None else 2
    steps = [s for a in found for turn in a.accepted_by_step or [] for s in turn]
    facts: dict[str, Any] = {
        "drafter": drafter,
        "drafter_path": drafter and f"runs/{drafter}",
        "drafter_fingerprint": drafter and "f0",
        "prompts": "a.jsonl",
        "in_domain": True,
        "num_speculative_tokens": k,
        "concurrency": 1,
        "drafts": len(steps) if drafter else 0,
        "accepted": [sum(s > p for s in steps) for p in range(k)],
        "output_tokens": sum(len(turn) for a in found for turn in a.token_ids),
        "seconds": 10.0,
        "refused": 0,
        "answers": found,
    }
    return Run(**{**facts, **changes})


def alone(**changes: Any) -> Run:
    silent = [
        Answer(a.id, a.source, a.token_ids, None, a.thinking) for a in changes.pop("answers", answers([0]))
    ]
    return a_run(None, silent, **changes)


def results(*runs: Run, drafters: tuple[str, ...] = ("base", "tuned")) -> dict[str, Any]:
    return evaluation.results(runs, drafters=drafters, verifier={"verifier": "v"}, settings={}, decode=str)


BASE, TUNED = [0, 1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 2, 1, 0, 0, 1]


def test_runs_have_the_keys_of_the_contract_and_the_verifier_comes_first():
    found = results(a_run("tuned", answers(TUNED), seconds=8.0), a_run("base", answers(BASE)), alone())
    assert [run["drafter"] for run in found["runs"]] == [None, "base", "tuned"]
    first, second, _ = found["runs"]
    assert (first["acceptance_length"], first["acceptance_by_position"], first["drafts"]) == (1.0, [], 0)
    # 12 prompts of 8 steps and 0 to 2 more: 108 drafts, two accepted tokens a prompt.
    assert second["drafts"] == 108
    assert second["acceptance_by_position"] == pytest.approx([24 / 108, 0.0])
    assert second["acceptance_length"] == pytest.approx(1 + 24 / 108)
    assert (second["output_tokens"], second["output_tokens_per_s"]) == (480, 48.0)
    assert second["prompts"] == "a.jsonl"
    assert second["num_speculative_tokens"] == 2
    low, high = second["acceptance_length_interval"]
    assert low < second["acceptance_length"] < high
    json.dumps(found)


def test_drafters_are_compared_at_the_lowest_concurrency_that_both_have():
    """The tuned one was added by a later call, with other concurrencies."""
    base = [a_run("base", answers(BASE), concurrency=streams) for streams in (1, 8, 32)]
    added = [a_run("tuned", answers(TUNED), concurrency=streams) for streams in (32, 8)]
    (pair,) = results(*base, *added)["comparisons"]
    assert (pair["a"], pair["b"], pair["concurrency"], pair["longer"]) == ("base", "tuned", 8, "tuned")
    apart = results(base[0], *added)
    assert apart["comparisons"] == []
    assert "not measured with the same prompts, K and concurrency" in apart["recommendation"]["text"][1]


def test_the_second_drafter_is_judged_against_the_start_and_all_others():
    named = ("base", "tuned", "scratch")
    steps = {"base": BASE, "tuned": TUNED, "scratch": BASE}
    found = results(alone(), *(a_run(name, answers(steps[name])) for name in named), drafters=named)
    pairs = [(pair["b"], pair["a"], pair["longer"]) for pair in found["comparisons"]]
    assert pairs == [("tuned", "base", "tuned"), ("scratch", "base", None), ("tuned", "scratch", "tuned")]
    starts = [text.split("**")[1] for text in found["recommendation"]["text"][1:]]
    assert starts == ["tuned against base", "tuned against scratch", "scratch against base"]


def test_speed_up_is_over_the_verifier_at_the_same_concurrency():
    found = results(
        alone(seconds=10.0),
        alone(concurrency=4, seconds=4.0),
        a_run("base", answers(BASE), seconds=8.0),
        a_run("base", answers(BASE), seconds=5.0, concurrency=4),
    )
    assert [run["speed_up"] for run in found["runs"]] == [1.0, 1.0, 1.25, 0.8]
    assert found["recommendation"]["speed_up"] == pytest.approx(1.0)


def test_a_longer_drafter_is_told_from_one_that_is_not():
    found = results(alone(), a_run("base", answers(BASE)), a_run("tuned", answers(TUNED)))
    (pair,) = found["comparisons"]
    assert (pair["a"], pair["b"], pair["compared"], pair["longer"]) == ("base", "tuned", 12, "tuned")
    # 6 accepted a prompt instead of 2 over 9 drafts on average.
    assert pair["difference"] == pytest.approx(4 * 12 / 108)
    same = results(alone(), a_run("base", answers(BASE)), a_run("tuned", answers(BASE)))["comparisons"][0]
    assert (same["difference"], same["longer"]) == (0.0, None)


def test_the_recommendation_says_what_is_gained_where_and_lost_where():
    found = results(
        alone(),
        alone(prompts="b.jsonl", in_domain=False, answers=answers([0], sources=("chat",))),
        a_run("base", answers(BASE)),
        a_run("tuned", answers(TUNED), seconds=5.0),
        a_run("base", answers(TUNED, sources=("chat",)), prompts="b.jsonl", in_domain=False),
        a_run("tuned", answers(BASE, sources=("chat",)), prompts="b.jsonl", in_domain=False, seconds=5.0),
    )
    advice = found["recommendation"]
    assert (advice["drafter"], advice["num_speculative_tokens"]) == ("tuned", 2)
    assert advice["speed_up"] == pytest.approx(2.0)
    fastest, verdict = advice["text"]
    assert "Fastest: tuned with K = 2" in fastest
    head, empty, gained, lost = verdict.splitlines()
    assert (head, empty) == ("**tuned against base**, acceptance length:", "")
    assert gained.startswith("* gained: math +0.444 (in domain, K = 2, 95 % +0.")
    assert lost.startswith("* lost: chat -0.444 (out of domain, K = 2, 95 % -0.")


def test_no_gain_is_said_to_be_none():
    found = results(alone(), a_run("base", answers(BASE)), a_run("tuned", answers(BASE)))
    assert found["recommendation"]["text"][1].splitlines()[2:] == [
        "* gained: nowhere",
        "* lost: nowhere beyond the interval",
        "* no difference: math +0.000 (in domain, K = 2, 95 % +0.000 to +0.000)",
    ]


def test_a_source_that_goes_another_way_than_its_file_is_told():
    def of(math: list[int], code: list[int]):
        return [answers(code if i % 2 else math, sources=("math", "code"))[i] for i in range(PROMPTS)]

    found = results(alone(), a_run("base", of(BASE, TUNED)), a_run("tuned", of([2] * 8, BASE)))
    gained, lost = found["recommendation"]["text"][1].splitlines()[2:]
    assert gained.startswith("* gained: math + code +")
    assert "alone" not in gained
    assert lost.startswith("* lost: code alone (of math + code) -0.444 (")


def test_a_drafter_slower_than_the_verifier_is_said_to_be():
    found = results(alone(), a_run("base", answers(BASE), seconds=20.0))
    assert "No drafter beats the verifier alone" in found["recommendation"]["text"][0]


def test_sources_are_counted_and_compared_apart():
    mixed = ("math", "code")
    found = results(
        alone(), a_run("base", answers(BASE, sources=mixed)), a_run("tuned", answers(TUNED, sources=mixed))
    )
    groups = found["runs"][1]["by_source"]
    assert {name: group["prompts"] for name, group in groups.items()} == {"math": 6, "code": 6}
    assert sum(group["drafts"] for group in groups.values()) == 108
    assert [pair["source"] for pair in found["comparisons"]] == [None, "math", "code"]


def test_the_first_difference_of_two_outputs_is_shown():
    changed = answers(BASE)
    changed[3].token_ids[0][7:] = [99] * 33
    found = results(alone(), a_run("base", changed))
    same = found["runs"][1]["same_output"]
    assert (same["compared"], same["equal"]) == (12, 11)
    assert same["share"] == pytest.approx(11 / 12)
    assert same["first_difference"] == {
        "id": "p3",
        "turn": 0,
        "token": 7,
        "expected": str([3] * 8),
        "found": str([99] * 8),
        "gap": None,
    }


def test_the_gap_says_whether_a_difference_is_a_tie():
    changed = answers(BASE)
    for i in (3, 5):
        changed[i].token_ids[0][7:] = [99] * 33
    same = results(alone(), a_run("base", changed, gaps={"p3": 0.0, "p5": 0.125}))["runs"][1]["same_output"]
    assert (same["equal"], same["largest_gap"], same["first_difference"]["gap"]) == (10, 0.125, 0.0)


def test_a_turn_that_only_one_side_has_is_no_difference():
    longer = [
        Answer(a.id, a.source, [*a.token_ids, [1, 2]], [*a.accepted_by_step, [0]], [0, 0])
        for a in answers(BASE)
    ]
    assert results(alone(), a_run("base", longer))["runs"][1]["same_output"]["equal"] == 12


def test_an_output_that_is_cut_short_differs_where_it_ends():
    changed = answers(BASE)
    del changed[0].token_ids[0][30:]
    first = results(alone(), a_run("base", changed))["runs"][1]["same_output"]["first_difference"]
    assert (first["token"], first["found"]) == (30, "[]")


def test_the_verifier_at_more_streams_is_compared_with_itself():
    found = results(alone(), alone(concurrency=8))
    assert found["runs"][0]["same_output"] is None
    assert found["runs"][1]["same_output"]["reference_concurrency"] == 1


def test_thinking_and_answer_are_counted_apart():
    thought = [
        Answer(a.id, a.source, a.token_ids, [[2, 2, 0, 1]], [7])  # steps at tokens 1-3, 4-6, 7, 8-9
        for a in answers(BASE)
    ]
    parts = results(alone(), a_run("base", thought))["runs"][1]["by_part"]
    assert parts["thinking"]["acceptance_by_position"] == [1.0, 1.0]
    assert parts["answer"]["acceptance_by_position"] == [0.5, 0.0]
    assert results(alone(), a_run("base", answers(BASE)))["runs"][1]["by_part"] is None


def test_without_acceptance_by_request_counters_stand_and_nothing_is_made_up():
    silent = [Answer(a.id, a.source, a.token_ids, None, a.thinking) for a in answers(BASE)]
    found = results(
        alone(),
        a_run("base", silent, drafts=100, accepted=[30, 10]),
        a_run("tuned", silent, drafts=100, accepted=[40, 10]),
    )
    run = found["runs"][1]
    assert run["acceptance_length"] == pytest.approx(1.4)
    assert run["acceptance_length_interval"] is None
    assert run["by_source"] is None
    assert found["comparisons"] == []


def test_a_run_survives_its_file():
    run = a_run("base", answers(BASE))
    assert Run.from_row(json.loads(json.dumps(run.to_row()))) == run


def test_prompt_files_are_called_by_what_they_ask_and_not_by_their_folder():
    def named(**sources: tuple[str, ...]) -> dict[str, str]:
        runs = [
            alone(prompts=f"runs/{folder}/prompts/eval.jsonl", answers=answers([0], sources=own))
            for folder, own in sources.items()
        ]
        return evaluation.prompt_sets(runs)

    first, second = "runs/base/prompts/eval.jsonl", "runs/tuned/prompts/eval.jsonl"
    assert named(base=("chat",), tuned=("math", "code")) == {first: "chat", second: "math + code"}
    # The same sources twice: only the files differ.
    assert named(base=("chat",), tuned=("chat",)) == {
        first: f"chat from {first}",
        second: f"chat from {second}",
    }
    assert named(base=("a", "b", "c", "d", "e")) == {first: "a + b + c + 2 more"}
