"""How the rows of a data set part: held-out ones, shards, those that fit a disk. Whole conversations, always.

Nothing here depends on the machine or on the order in which rows were made: conversations are ranked by a
hash of their id, which mixes sources and lengths, so each part is a fair sample of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InputError

Rows = NDArray[np.int64]


def held_out_from(ids: Sequence[str], eval_ratio: float) -> int:
    """First held-out row, moved so that no conversation has turns (`prompt#turn`) on both sides.

    Args:
        ids: of all rows.
        eval_ratio: share of the rows to hold out, from the end.
    """
    boundary = min(max(round(len(ids) * (1 - eval_ratio)), 1), len(ids) - 1)
    prompts = [_prompt(row) for row in ids]
    while 0 < boundary < len(ids) and prompts[boundary] == prompts[boundary - 1]:
        boundary -= 1
    return boundary


def into_shards(ids: Sequence[str], sizes: Sequence[int], shards: int) -> list[Rows]:
    """Part rows into `shards` of about equal size.

    Args:
        ids: of the rows that train.
        sizes: tokens of each.
        shards: how many.

    Returns:
        The row numbers of each shard, ascending.

    Raises:
        InputError: a shard would be empty.
    """
    parts: list[list[int]] = [[] for _ in range(shards)]
    before, whole = 0, sum(sizes)
    for rows in _conversations(ids):
        # A conversation belongs where its first token falls when all are laid end to end.
        parts[before * shards // whole] += rows
        before += sum(sizes[row] for row in rows)
    if not all(parts):
        raise InputError(
            f"--shard .../{shards}: {len(ids)} rows that train do not fill so many shards. Take fewer."
        )
    return [np.array(sorted(rows), np.int64) for rows in parts]


def that_fit(ids: Sequence[str], sizes: Sequence[int], room: float) -> Rows:
    """Rows that go into `room` together: conversations by rank up to the first that does not fit.

    A larger room so gives the same rows and some more.

    Args:
        ids: of all rows.
        sizes: bytes of each.
        room: bytes.

    Returns:
        Row numbers, ascending.
    """
    taken: list[int] = []
    for rows in _conversations(ids):
        room -= sum(sizes[row] for row in rows)
        if room < 0:
            break
        taken += rows
    return np.array(sorted(taken), np.int64)


def _prompt(row_id: str) -> str:
    return row_id.rpartition("#")[0] or row_id


def _conversations(ids: Sequence[str]) -> list[list[int]]:
    """The rows of each conversation, in the order of a hash of the prompt's id."""
    found: dict[str, list[int]] = {}
    for row, row_id in enumerate(ids):
        found.setdefault(_prompt(row_id), []).append(row)
    return [
        found[prompt] for prompt in sorted(found, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    ]
