"""The choice by hashes: exact, disjoint, complete, fair to each source, and the same for the same seed."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common import split
from common.errors import InputError


def keys_of(count: int, sources: list[str]) -> split.Keys:
    keys = split.Keys()
    hashes = [hashlib.blake2b(str(n).encode(), digest_size=16).digest() for n in range(count)]
    keys.add(hashes, hashes, [sources[n % len(sources)] for n in range(count)])
    return keys


@settings(max_examples=100, deadline=None)
@given(
    openings=st.lists(st.integers(0, 30), min_size=8, max_size=80),
    sources=st.lists(st.integers(0, 3), min_size=80, max_size=80),
    count=st.integers(0, 7),
    limit=st.none() | st.integers(1, 20),
    seed=st.integers(0, 5),
)
def test_any_split_is_exact_disjoint_and_complete(
    openings: list[int], sources: list[int], count: int, limit: int | None, seed: int
) -> None:
    assume(len(set(openings)) > count)
    keys = split.Keys()
    prompts = [(opening * 1000 + row % 3).to_bytes(16, "big") for row, opening in enumerate(openings)]
    keys.add(prompts, [n.to_bytes(16, "big") for n in openings], [str(n) for n in sources[: len(openings)]])
    names = [split.FATES[fate] for fate in split.choose(keys, None, count, limit, seed)]
    assert names.count("eval") == count
    train = [opening for opening, name in zip(openings, names, strict=True) if name == "train"]
    held_out = [opening for opening, name in zip(openings, names, strict=True) if name == "eval"]
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == count
    assert limit is None or len(train) <= limit
    assert limit is None or "over_max_samples" not in names or len(train) == limit


def test_equal_sources_share_the_held_out_places_by_the_seed_and_not_by_their_order() -> None:
    sources = [f"source {n}" for n in range(50)]
    keys = keys_of(1000, sources)
    seen: Counter[int] = Counter()
    for seed in range(20):
        fates = split.choose(keys, None, 5, None, seed)
        seen.update(row % 50 for row in (fates == split.EVAL).nonzero()[0])
    assert seen.total() == 100
    assert max(seen.values()) < 10


def test_the_sample_is_even_over_the_rows_and_the_same_for_the_same_seed() -> None:
    keys = keys_of(20000, ["s"])
    first, again, other = (split.choose(keys, None, 0, 2000, seed) == split.TRAIN for seed in (1, 1, 2))
    assert (first == again).all()
    assert 120 < (first & other).sum() < 280
    quarters = first.reshape(4, -1).sum(axis=1)
    assert quarters.sum() == 2000
    assert quarters.min() > 400


def test_keys_that_share_their_first_half_are_not_taken_for_duplicates() -> None:
    keys = split.Keys()
    both = [bytes(8) + bytes([n]) * 8 for n in range(3)]
    keys.add(both, both, ["s"] * 3)
    assert split.choose(keys, None, 0, None, 0).tolist() == [split.TRAIN] * 3


def test_nothing_is_left_to_train_on_is_bad_input() -> None:
    with pytest.raises(InputError, match="--eval-prompts 3: there are 3 different openings"):
        split.choose(keys_of(3, ["s"]), None, 3, None, 0)
