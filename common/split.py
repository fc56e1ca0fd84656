"""Which prompts are trained on, which are held out, which are left out: chosen by hashes alone."""

from __future__ import annotations

import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import InputError

if TYPE_CHECKING:
    import numpy as np

FATES = ("train", "eval", "duplicate", "shares_held_out_opening", "over_max_samples", "other_source")
TRAIN, EVAL, _DUPLICATE, _SHARES_OPENING, _OVER_MAX, _OTHER_SOURCE = range(6)


@dataclass
class Keys:
    """What is remembered of each usable row, 36 bytes: the texts stay on the disk.

    Attributes:
        prompts: 16 bytes a row, equal for duplicates.
        openings: 16 bytes a row, equal for the same first prompt.
        source_ids: index of each row's source.
        source_names: name -> index.
    """

    prompts: bytearray = field(default_factory=bytearray)
    openings: bytearray = field(default_factory=bytearray)
    source_ids: array.array[int] = field(default_factory=lambda: array.array("I"))
    source_names: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.source_ids)

    def add(self, prompts: Iterable[bytes], openings: Iterable[bytes], sources: Iterable[str]) -> None:
        """Append rows."""
        self.prompts += b"".join(prompts)
        self.openings += b"".join(openings)
        names = self.source_names
        self.source_ids.extend(names.setdefault(name, len(names)) for name in sources)


def choose(
    keys: Keys, wanted: list[str] | None, eval_prompts: int, max_samples: int | None, seed: int
) -> np.ndarray:
    """Decide the fate of each row.

    Held-out prompts are whole openings (first user messages): one row of an opening is evaluated, the
    others are left out. Draws go by content and seed: a row that joins or leaves does not reshuffle the rest.

    Args:
        keys: of n rows.
        wanted: names of sources to take; None takes all.
        eval_prompts: number of rows to hold out, exactly.
        max_samples: number of rows to train on at most; None takes all.
        seed: of the draws.

    Returns:
        [n] uint8, each an index into `FATES`.

    Raises:
        InputError: a source is unknown, or too few openings are there to hold out so many.
    """
    import numpy as np

    prompts = np.frombuffer(keys.prompts, np.dtype(">u8")).reshape(-1, 2)
    openings = np.frombuffer(keys.openings, np.dtype(">u8")).reshape(-1, 2)
    sources = np.frombuffer(keys.source_ids, np.uint32)
    asked = np.isin(sources, _source_ids(keys, wanted))
    fates = np.full(len(sources), _OTHER_SOURCE, np.uint8)
    fates[asked] = _choose_among(
        prompts[asked], openings[asked], sources[asked], eval_prompts, max_samples, seed
    )
    return fates


def _choose_among(
    prompts: np.ndarray,
    openings: np.ndarray,
    sources: np.ndarray,
    eval_prompts: int,
    max_samples: int | None,
    seed: int,
) -> np.ndarray:
    import numpy as np

    rows = np.arange(len(sources))
    fates = np.full(len(sources), TRAIN, np.uint8)

    first_of_opening = _first_equal(openings)
    unique = _first_equal(prompts) == rows
    candidates = rows[first_of_opening == rows]
    if eval_prompts >= len(candidates):
        raise InputError(
            f"--eval-prompts {eval_prompts}: there are {len(candidates)} different openings, and none would "
            "be left to train on. Ask for fewer, or add a --dataset."
        )
    held = candidates[
        _stratified(_ranks(openings[candidates], seed), sources[candidates], eval_prompts, seed)
    ]
    fates[np.isin(first_of_opening, held)] = _SHARES_OPENING
    fates[~unique] = _DUPLICATE
    fates[held] = EVAL

    training = rows[fates == TRAIN]
    if max_samples is not None and len(training) > max_samples:
        order = np.argsort(_ranks(prompts[training], seed + 1), kind="stable")
        fates[training[order[max_samples:]]] = _OVER_MAX
    return fates


def _source_ids(keys: Keys, wanted: list[str] | None) -> list[int]:
    unknown = set(wanted or ()) - keys.source_names.keys()
    if unknown:
        found = ", ".join(list(keys.source_names)[:20])
        raise InputError(f"--source {min(unknown)}: no usable row has this source, found: {found}")
    return [keys.source_names[name] for name in wanted or keys.source_names]


def _first_equal(keys: np.ndarray) -> np.ndarray:
    """For each row of `keys` [n, 2] uint64 the index of the first row that equals it, [n] int64."""
    import numpy as np

    order = np.lexsort((keys[:, 1], keys[:, 0]))
    starts = np.ones(len(keys), bool)
    starts[1:] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    first = np.empty(len(keys), np.int64)
    # lexsort is stable: the first of each run of equal keys is the earliest row.
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first


def _ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """A pseudo-random rank of each key, [n] uint64: the same key and seed rank the same everywhere."""
    import numpy as np

    # splitmix64's finaliser; the keys are hashes already, the seed has to reach every bit.
    mixed = keys[:, 0].astype(np.uint64) ^ np.random.default_rng(seed).integers(2**64, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _stratified(ranks: np.ndarray, sources: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of `count` rows, from each source in proportion (largest remainders), lowest ranks first."""
    import numpy as np

    sizes = np.bincount(sources)
    exact = sizes * (count / len(sources))
    quotas = np.floor(exact).astype(np.int64)
    # Among equal remainders the seed decides: else the sources named first would have the places.
    by_remainder = np.lexsort((np.random.default_rng(seed).permutation(len(sizes)), quotas - exact))
    quotas[by_remainder[: count - quotas.sum()]] += 1
    order = np.lexsort((ranks, sources))
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    place = np.arange(len(sources)) - starts[sources[order]]
    return order[place < quotas[sources[order]]]
