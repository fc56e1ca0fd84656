"""The served half of common/acceptance.py: vLLM's counters, steps of an answer, intervals over prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import acceptance
from common.acceptance import Acceptance, Counters
from common.errors import InputError

# Out of a vLLM 0.32.0 that had answered two prompts with the shared SmolLM2 head, K = 3; trimmed.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 119.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.796048206284811e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 41.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 158.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",enable_prefix_caching="False",engine="0"} 1.0
"""

WITHOUT_DRAFTER = """\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 10.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{enable_prefix_caching="True",engine="0"} 1.0
"""

# vLLM's per_step_accepted of the second of those prompts, 30 output tokens.
STEPS = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1, 3]


def test_counters_are_read_by_position():
    counters = Counters.parse(METRICS)
    assert counters == Counters(drafts=119, accepted=(33, 6, 2), output_tokens=158, prefix_caching=False)
    assert counters.num_speculative_tokens == 3
    assert counters.acceptance.length == pytest.approx(1 + 41 / 119)


def test_a_server_without_a_drafter_drafts_nothing():
    counters = Counters.parse(WITHOUT_DRAFTER)
    assert counters == Counters(drafts=0, accepted=(), output_tokens=10, prefix_caching=True)
    assert counters.acceptance.length == 1.0


def test_the_engines_of_a_server_are_summed():
    second = METRICS.replace('engine="0"', 'engine="1"').splitlines()
    both = METRICS + "\n".join(line for line in second if not line.startswith("#")) + "\n"
    assert Counters.parse(both).drafts == 238
    assert Counters.parse(both).accepted == (66, 12, 4)


def test_what_happened_between_two_readings_is_their_difference():
    later = Counters(drafts=129, accepted=(40, 8, 2), output_tokens=180, prefix_caching=False)
    assert later - Counters.parse(METRICS) == Counters(10, (7, 2, 0), 22, False)


def test_metrics_of_another_server_are_refused():
    with pytest.raises(InputError, match="generation_tokens_total"):
        Counters.parse("# TYPE http_requests_total counter\nhttp_requests_total 3.0\n")


def test_steps_of_an_answer_become_acceptance_by_position():
    assert acceptance.of_steps(STEPS, 3) == Acceptance(drafts=23, accepted=(6, 1, 1))


@given(st.lists(st.integers(0, 4)))
def test_steps_agree_with_a_slow_count(steps: list[int]):
    found = acceptance.of_steps(steps, 4)
    assert found.drafts == len(steps)
    assert found.length == pytest.approx(1 + (sum(steps) / len(steps) if steps else 0))


def test_steps_are_parted_where_the_thinking_ends():
    # Tokens: 0 from the prefill, then steps at 1-3, 4, 5-6, 7.
    steps = [2, 0, 1, 0]
    assert acceptance.split_steps(steps, 4) == ([2], [0, 1, 0])
    assert acceptance.split_steps(steps, 5) == ([2, 0], [1, 0])
    # A step that straddles the end belongs to where it starts.
    assert acceptance.split_steps(steps, 6) == ([2, 0, 1], [0])
    assert acceptance.split_steps(steps, 0) == ([], steps)
    assert acceptance.split_steps(steps, 100) == (steps, [])


def test_intervals_hold_the_value_and_narrow_with_more_prompts():
    few = [
        Acceptance(100, (20, 5)),
        Acceptance(100, (40, 15)),
        Acceptance(100, (30, 10)),
        Acceptance(50, (15, 4)),
    ]
    wide, narrow = acceptance.intervals(few), acceptance.intervals(few * 16)
    assert wide is not None
    assert narrow is not None
    # 105 + 34 accepted of 350.
    assert wide.length[0] < 1 + 139 / 350 < wide.length[1]
    assert narrow.length[1] - narrow.length[0] == pytest.approx(
        (wide.length[1] - wide.length[0]) / 4, rel=0.15
    )
    assert [low < share < high for (low, high), share in zip(wide.by_position, (0.3, 34 / 350), strict=True)]


def test_the_bootstrap_agrees_with_the_normal_approximation_for_many_prompts():
    # 400 prompts of 10 drafts, half with 2 accepted and half with 4: mean 0.3, sd of a prompt 0.1.
    prompts = [Acceptance(10, (2,)), Acceptance(10, (4,))] * 200
    found = acceptance.intervals(prompts)
    assert found is not None
    half = 1.96 * 0.1 / 400**0.5
    assert found.length == pytest.approx((1.3 - half, 1.3 + half), abs=0.001)


def test_one_prompt_has_no_interval():
    assert acceptance.intervals([Acceptance(10, (2,))]) is None
    assert acceptance.difference([Acceptance(10, (2,))], [Acceptance(10, (3,))]) is None


def test_prompts_without_a_draft_do_not_divide_by_zero():
    found = acceptance.intervals([Acceptance(0, (0,)), Acceptance(0, (0,))])
    assert found is not None
    assert found.length == (1.0, 1.0)


def test_a_difference_is_paired():
    """Prompts differ by far more than the drafters do, and b is longer on each: the pairing must see it."""
    a = [Acceptance(100, (count,)) for count in (10, 30, 50, 70, 90)]
    b = [Acceptance(100, (count,)) for count in (13, 32, 53, 72, 93)]
    found = acceptance.difference(a, b)
    assert found is not None
    assert found.value == pytest.approx(0.026)
    assert found.sign == 1
    backwards = acceptance.difference(b, a)
    assert backwards is not None
    assert backwards.sign == -1


def test_a_difference_inside_its_interval_is_none():
    a = [Acceptance(100, (count,)) for count in (10, 30, 50, 70)]
    b = [Acceptance(100, (count,)) for count in (12, 27, 53, 69)]
    found = acceptance.difference(a, b)
    assert found is not None
    assert found.sign == 0
