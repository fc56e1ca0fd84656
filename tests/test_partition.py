"""How rows part: whole conversations, the same everywhere, mixed and of like size."""

from __future__ import annotations

import pytest

from common import partition
from common.errors import InputError

# By the SHA-256 of the prompt's id: c (2e7d...), b (3e23...), a (ca97...), d (18ac...) -> d, c, b, a.
IDS = ["a#0", "b#0", "b#1", "c#0", "d#0", "d#1"]


def test_conversations_that_fit_are_taken_by_rank_up_to_the_first_that_does_not() -> None:
    sizes = [10, 30, 30, 20, 5, 5]
    assert partition.that_fit(IDS, sizes, 100).tolist() == [0, 1, 2, 3, 4, 5]
    assert partition.that_fit(IDS, sizes, 99).tolist() == [1, 2, 3, 4, 5]
    # b's 60 do not fit beside d and c; a, behind it, would fit and is not taken for its size.
    assert partition.that_fit(IDS, sizes, 89).tolist() == [3, 4, 5]
    assert partition.that_fit(IDS, sizes, 9).tolist() == []


def test_shards_are_whole_conversations_of_like_size() -> None:
    sizes = [10, 10, 10, 10, 10, 10]
    # 60 tokens in two: d's two rows and c's start before 30, b's at 30.
    assert [part.tolist() for part in partition.into_shards(IDS, sizes, 2)] == [[3, 4, 5], [0, 1, 2]]
    assert [part.tolist() for part in partition.into_shards(IDS, sizes, 1)] == [[0, 1, 2, 3, 4, 5]]


def test_shards_do_not_depend_on_the_order_in_which_rows_were_made() -> None:
    ids = [f"prompt{number}#0" for number in range(100)]
    sizes = [50 + number for number in range(100)]
    parts = partition.into_shards(ids, sizes, 4)
    other = partition.into_shards(ids[::-1], sizes[::-1], 4)
    assert [{ids[row] for row in part} for part in parts] == [
        {ids[99 - row] for row in part} for part in other
    ]
    assert sorted(row for part in parts for row in part) == list(range(100))
    tokens = [sum(sizes[row] for row in part) for part in parts]
    assert max(tokens) - min(tokens) < 2 * max(sizes)
    # Of two sources of fifty rows that lie one behind the other, each shard has both.
    assert [sum(row < 50 for row in part) for part in parts] == [9, 8, 19, 14]
    assert [len(part) for part in parts] == [24, 23, 29, 24]


def test_more_shards_than_conversations_are_refused() -> None:
    with pytest.raises(InputError, match=r"--shard \.\.\./5: 6 rows that train do not fill so many shards"):
        partition.into_shards(IDS, [10] * 6, 5)
