"""The draft vocabulary: token counts -> d2t/t2d, and every dialect of the map -> one canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import atomic_io, manifest
from common.errors import InputError

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Which of the verifier's tokens a drafter can propose; lm_head row i is the i-th smallest of them.

    Attributes:
        token_ids: [D] int64, ascending, unique, in [0, V).
        vocab_size: V, the verifier's vocabulary.
    """

    token_ids: Ids
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        if (
            ids.ndim != 1
            or not len(ids)
            or ids[0] < 0
            or ids[-1] >= self.vocab_size
            or (np.diff(ids) <= 0).any()
        ):
            raise InputError(
                f"a draft vocabulary must list ascending, unique token ids in [0, {self.vocab_size}); "
                f"found {len(ids)} ids from {ids.min(initial=0)} to {ids.max(initial=0)}"
            )

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Every token of the verifier (D = V): no map is needed."""
        return cls(np.arange(vocab_size, dtype=np.int64), vocab_size)

    @classmethod
    def most_frequent(cls, counts: Ids, size: int, forced: Sequence[int] = ()) -> DraftVocab:
        """The `size` most frequent tokens, the forced ones among them; ties go to the smaller id.

        Args:
            counts: [V] int64, occurrences in supervised positions.
            size: D, at most V.
            forced: ids that must be in, whatever their count (stop and thinking markers).

        Raises:
            InputError: `size` does not fit V or the forced ids, or a forced id is outside of the vocabulary.
        """
        vocab_size = len(counts)
        outside = [token for token in forced if not 0 <= token < vocab_size]
        if outside:
            raise InputError(
                f"--force-token {outside[0]} is outside of the verifier's vocabulary of {vocab_size}"
            )
        if not max(1, len(set(forced))) <= size <= vocab_size:
            raise InputError(
                f"--draft-vocab-size {size} must lie between the {len(set(forced))} forced tokens and the "
                f"verifier's vocabulary of {vocab_size}"
            )
        rank = counts.astype(np.int64, copy=True)
        rank[list(forced)] = np.iinfo(np.int64).max
        chosen = np.argsort(-rank, kind="stable")[:size]
        return cls(np.sort(chosen), vocab_size)

    @classmethod
    def load(cls, folder: Path) -> DraftVocab:
        """Read `d2t.npy` and `t2d.npy`, ours or those that speculators wrote.

        Raises:
            InputError: a file is missing or damaged, or the two contradict each other.
        """
        d2t, t2d = read_array(folder / "d2t.npy"), read_array(folder / "t2d.npy")
        source = read_dialect(d2t, t2d, rows=len(d2t), vocab_size=len(t2d), origin=str(folder))
        if not source.is_canonical:
            raise InputError(
                f"{folder / 'd2t.npy'} is no ascending offset table ({source.dialect}). "
                "Run 02_build_vocab_map.py --overwrite."
            )
        return source.vocab

    def save(self, folder: Path) -> None:
        """Write `d2t.npy` and `t2d.npy` in speculators' format."""
        for name, array in (("d2t", self.d2t), ("t2d", self.t2d)):
            with atomic_io.replacing(folder / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether every token of the verifier is in (D = V)."""
        return len(self) == self.vocab_size

    @property
    def d2t(self) -> Ids:
        """[D] int64 offsets: the token of row i is `i + d2t[i]`."""
        return self.token_ids - np.arange(len(self), dtype=np.int64)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """[V] bool: whether a token is in."""
        mask = np.zeros(self.vocab_size, dtype=bool)
        mask[self.token_ids] = True
        return mask

    @property
    def fingerprint(self) -> str:
        """A short hash for the manifests."""
        return manifest.fingerprint_of((self.vocab_size, self.token_ids.tolist()))

    def coverage(self, counts: Ids) -> float:
        """Share of the counted tokens that this vocabulary can propose: the ceiling of its acceptance."""
        total = int(counts.sum())
        return float(counts[self.token_ids].sum()) / total if total else 0.0


@dataclass(frozen=True)
class SourceMap:
    """A checkpoint's map in canonical form.

    Attributes:
        vocab: ascending.
        order: [D] int64; row i of the canonical lm_head is row `order[i]` of the checkpoint's.
        dialect: what was found, for the report.
    """

    vocab: DraftVocab
    order: Ids
    dialect: str

    @property
    def is_canonical(self) -> bool:
        """Whether the rows are in ascending order of their tokens already and the table held offsets."""
        ascending = bool((self.order == np.arange(len(self.order))).all())
        return ascending and not self.dialect.startswith("absolute")


def read_dialect(
    d2t: Sequence[int] | Ids | None,
    t2d: Sequence[bool] | NDArray[Any] | None,
    *,
    rows: int,
    vocab_size: int,
    origin: str,
) -> SourceMap:
    """Bring a checkpoint's map into canonical form, or refuse it.

    Args:
        d2t: offsets (`token = i + d2t[i]`) or absolute ids (`token = d2t[i]`), in any order, or None.
        t2d: [V] of truth values; None when absent.
        rows: D, the rows of the checkpoint's lm_head.
        vocab_size: V of the verifier that is trained for.
        origin: the file, for errors.

    Returns:
        The canonical vocabulary, and the order that sorts the checkpoint's rows into it.

    Raises:
        InputError: rows and entries differ in number, d2t is not of integers, the two maps contradict each
            other, there is no map although D < V, or it could be read both ways.
    """
    mask = None if t2d is None else np.asarray(t2d).astype(bool).ravel()
    if mask is not None and len(mask) != vocab_size:
        raise InputError(
            f"{origin}: t2d has {len(mask)} entries, the verifier has {vocab_size} tokens: this head was "
            "trained for another verifier vocabulary. Its rows cannot be matched; train from scratch "
            "instead."
        )
    if d2t is None:
        return _without_d2t(mask, rows, vocab_size, origin)
    table = np.asarray(d2t).ravel()
    if not np.issubdtype(table.dtype, np.integer):
        raise InputError(
            f"{origin}: d2t is of type {table.dtype}, expected integers: floating point rounds large token "
            "ids without an error. Use the d2t of the head as it was trained."
        )
    table = table.astype(np.int64)
    if len(table) != rows:
        raise InputError(
            f"{origin}: lm_head has {rows} rows but d2t has {len(table)} entries. Loading would pair rows "
            "with wrong tokens and acceptance would fall without an error. Use the d2t that was saved with "
            "this head."
        )
    if rows == vocab_size and not table.any() and _names_all(mask):
        return SourceMap(DraftVocab.full(vocab_size), np.arange(rows), "full vocabulary, all-zero d2t")
    if not table.any() and mask is None:
        raise InputError(
            f"{origin}: d2t is all zeros for {rows} rows of {vocab_size} tokens and there is no t2d: the "
            "map was never filled, and taking it as it is would give the rows to the first tokens. Use the "
            "head's real d2t."
        )
    tokens, kind = _tokens_of(table, mask, vocab_size, origin)
    order = np.argsort(tokens, kind="stable")
    ordering = "ascending" if (order == np.arange(rows)).all() else "rows re-sorted by token"
    note = "" if mask is not None else ", t2d derived"
    return SourceMap(DraftVocab(tokens[order], vocab_size), order, f"{kind}, {ordering}{note}")


def _without_d2t(mask: NDArray[np.bool_] | None, rows: int, vocab_size: int, origin: str) -> SourceMap:
    if rows == vocab_size and _names_all(mask):
        return SourceMap(DraftVocab.full(vocab_size), np.arange(rows), "full vocabulary, no map")
    if mask is not None and int(mask.sum()) == rows:
        return SourceMap(DraftVocab(np.flatnonzero(mask), vocab_size), np.arange(rows), "t2d only, ascending")
    raise InputError(
        f"{origin}: lm_head has {rows} rows for {vocab_size} tokens and no d2t says which. Any guess would "
        "pair rows with wrong tokens. Add the head's d2t, or train from scratch."
    )


def _tokens_of(table: Ids, mask: NDArray[np.bool_] | None, vocab_size: int, origin: str) -> tuple[Ids, str]:
    """The token of each row by the reading, offsets or absolute, that is a map and agrees with t2d."""
    readings = {"offsets": table + np.arange(len(table), dtype=np.int64), "absolute ids": table}
    valid = {kind: tokens for kind, tokens in readings.items() if _is_map(tokens, vocab_size)}
    if mask is not None:
        agreeing = {kind: tokens for kind, tokens in valid.items() if _same_set(tokens, mask)}
        if valid and not agreeing:
            raise InputError(
                f"{origin}: d2t and t2d name different tokens (d2t {len(table)}, t2d {int(mask.sum())}). "
                "One of them belongs to another head; acceptance would fall without an error. Use the pair "
                "saved with this head."
            )
        valid = agreeing
    elif len(valid) == 2:
        # Read as offsets, a strictly rising table would mean that no two neighbouring ids are both in.
        valid.pop("offsets")
        if (np.diff(table) < 1).any():
            raise InputError(
                f"{origin}: d2t can be read as offsets and as absolute ids, and there is no t2d to decide. A "
                "guess could pair rows with wrong tokens without an error. Add the head's t2d."
            )
    for kind, tokens in valid.items():
        return tokens, kind
    raise InputError(
        f"{origin}: d2t is no map, neither as offsets nor as absolute ids: tokens repeat or leave the "
        f"vocabulary of {vocab_size}. Use the d2t that was saved with this head."
    )


def _names_all(mask: NDArray[np.bool_] | None) -> bool:
    """Whether t2d leaves no token out; trainers of full-vocabulary heads may save it never filled."""
    return mask is None or bool(mask.all()) or not mask.any()


def _is_map(tokens: Ids, vocab_size: int) -> bool:
    return bool(tokens.min() >= 0 and tokens.max() < vocab_size and len(np.unique(tokens)) == len(tokens))


def _same_set(tokens: Ids, mask: NDArray[np.bool_]) -> bool:
    return int(mask.sum()) == len(tokens) and bool(mask[tokens].all())


def read_array(path: Path) -> NDArray[Any]:
    """Read an array that 02 wrote.

    Raises:
        InputError: the file is missing, damaged, or would need unpickling.
    """
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Run 02_build_vocab_map.py first.") from None
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path} is no plain array: {error}. Run 02_build_vocab_map.py --overwrite."
        ) from None
