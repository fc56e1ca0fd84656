"""The draft vocabulary: chosen by count, saved in speculators' format, and read out of every dialect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft_vocab import DraftVocab, SourceMap, read_array, read_dialect
from common.errors import InputError

V = 12
TOKENS = [2, 3, 5, 8, 11]
OFFSETS = [2, 2, 3, 5, 7]  # 2-0, 3-1, 5-2, 8-3, 11-4
T2D = [False, False, True, True, False, True, False, False, True, False, False, True]


def read(d2t, t2d=None, rows: int = 5, vocab_size: int = V) -> SourceMap:
    return read_dialect(d2t, t2d, rows=rows, vocab_size=vocab_size, origin="head/")


# ----------------------------------------------------------------------------------------------------------
# Its own form


def test_the_map_is_offsets_and_the_mask_is_over_the_verifier_s_tokens() -> None:
    vocab = DraftVocab(np.array(TOKENS), V)
    assert vocab.d2t.tolist() == OFFSETS
    assert vocab.d2t.dtype == np.int64
    assert vocab.t2d.tolist() == T2D
    assert vocab.t2d.dtype == np.bool_
    assert len(vocab) == 5
    assert not vocab.is_full


def test_a_full_vocabulary_has_zero_offsets() -> None:
    vocab = DraftVocab.full(4)
    assert vocab.is_full
    assert vocab.d2t.tolist() == [0, 0, 0, 0]
    assert vocab.t2d.all()


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 2], [2, V], [[1, 2]]])
def test_ids_that_are_no_vocabulary_are_refused(ids: list) -> None:
    with pytest.raises(InputError, match="ascending, unique token ids in"):
        DraftVocab(np.array(ids, dtype=np.int64), V)


def test_the_fingerprint_tells_vocabularies_apart() -> None:
    same = [DraftVocab(np.array(TOKENS), V).fingerprint for _ in range(2)]
    others = [DraftVocab(np.array(TOKENS[:4]), V).fingerprint, DraftVocab(np.array(TOKENS), 13).fingerprint]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 3


# ----------------------------------------------------------------------------------------------------------
# Chosen by count


def test_the_most_frequent_tokens_are_taken_and_ties_go_to_the_smaller_id() -> None:
    counts = np.array([0, 5, 9, 5, 5, 1])
    assert DraftVocab.most_frequent(counts, 3).token_ids.tolist() == [1, 2, 3]
    assert DraftVocab.most_frequent(counts, 5).token_ids.tolist() == [1, 2, 3, 4, 5]
    assert DraftVocab.most_frequent(counts, 6).is_full


def test_forced_tokens_take_the_place_of_the_rarest() -> None:
    counts = np.array([0, 5, 9, 5, 5, 1])
    assert DraftVocab.most_frequent(counts, 3, forced=[0, 5, 0]).token_ids.tolist() == [0, 2, 5]
    assert DraftVocab.most_frequent(counts, 2, forced=[0, 5]).token_ids.tolist() == [0, 5]


def test_unseen_tokens_fill_up_from_the_smallest_id_as_in_speculators() -> None:
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = np.array([0, 0, 4, 0, 7, 0, 0])
    vocab = DraftVocab.most_frequent(counts, 4)
    assert vocab.token_ids.tolist() == [0, 1, 2, 4]
    d2t, t2d = build_vocab_mappings_from_distribution({2: 4, 4: 7}, 4, 7)
    assert d2t.tolist() == vocab.d2t.tolist() == [0, 0, 0, 1]
    assert t2d.tolist() == vocab.t2d.tolist()


@pytest.mark.parametrize(
    ("size", "forced", "message"),
    [
        (13, [], "--draft-vocab-size 13 must lie between the 0 forced tokens"),
        (1, [3, 4], "--draft-vocab-size 1 must lie between the 2 forced tokens"),
        (0, [], "--draft-vocab-size 0"),
        (4, [V], "--force-token 12 is outside of the verifier's vocabulary of 12"),
        (4, [-1], "--force-token -1 is outside"),
    ],
)
def test_sizes_and_forced_tokens_that_do_not_fit_are_refused(size: int, forced, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DraftVocab.most_frequent(np.ones(V, dtype=np.int64), size, forced)


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counts = np.zeros(V, dtype=np.int64)
    counts[[2, 3, 4]] = [6, 1, 3]
    assert DraftVocab(np.array(TOKENS), V).coverage(counts) == 0.7
    assert DraftVocab(np.array([0, 1]), V).coverage(counts) == 0.0
    assert DraftVocab(np.array([0, 1]), V).coverage(np.zeros(V, dtype=np.int64)) == 0.0


# ----------------------------------------------------------------------------------------------------------
# On disk


def test_what_is_saved_is_read_back_and_is_speculators_format(tmp_path) -> None:
    DraftVocab(np.array(TOKENS), V).save(tmp_path)
    d2t, t2d = np.load(tmp_path / "d2t.npy"), np.load(tmp_path / "t2d.npy")
    assert (d2t.dtype, d2t.tolist()) == (np.int64, OFFSETS)
    assert (t2d.dtype, t2d.tolist()) == (np.bool_, T2D)
    assert DraftVocab.load(tmp_path).token_ids.tolist() == TOKENS


def test_a_full_vocabulary_is_read_back(tmp_path) -> None:
    DraftVocab.full(V).save(tmp_path)
    assert DraftVocab.load(tmp_path).is_full


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, r"d2t.npy: no such file. Run 02_build_vocab_map.py"),
        (b"", r"d2t.npy is no plain array"),
        (b"\x93NUMPY torn", r"d2t.npy is no plain array"),
        (TOKENS, r"no ascending offset table \(absolute ids"),
        ([5, 1, 1, 5, 7], r"no ascending offset table \(offsets, rows re-sorted"),
        (OFFSETS[:4], r"name different tokens \(d2t 4, t2d 5\)"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, d2t, message: str) -> None:
    np.save(tmp_path / "t2d.npy", np.array(T2D))
    if isinstance(d2t, bytes):
        (tmp_path / "d2t.npy").write_bytes(d2t)
    elif d2t is not None:
        np.save(tmp_path / "d2t.npy", np.array(d2t))
    with pytest.raises(InputError, match=message):
        DraftVocab.load(tmp_path)


def test_nothing_is_unpickled(tmp_path) -> None:
    np.save(tmp_path / "d2t.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="is no plain array"):
        read_array(tmp_path / "d2t.npy")


# ----------------------------------------------------------------------------------------------------------
# Dialects: one head of five rows, written down in each

# The token of each row when the rows are in order of frequency, or specials first.
BY_FREQUENCY = [8, 2, 11, 3, 5]
SPECIALS_FIRST = [11, 2, 3, 5, 8]


@pytest.mark.parametrize(
    ("d2t", "t2d", "order", "dialect"),
    [
        (OFFSETS, T2D, [0, 1, 2, 3, 4], "offsets, ascending"),
        (OFFSETS, None, [0, 1, 2, 3, 4], "offsets, ascending, t2d derived"),
        (TOKENS, T2D, [0, 1, 2, 3, 4], "absolute ids, ascending"),
        # 8-0, 2-1, 11-2, 3-3, 5-4: row 1 has the smallest token, then rows 3, 4, 0, 2.
        ([8, 1, 9, 0, 1], T2D, [1, 3, 4, 0, 2], "offsets, rows re-sorted by token"),
        ([8, 1, 9, 0, 1], None, [1, 3, 4, 0, 2], "offsets, rows re-sorted by token, t2d derived"),
        (BY_FREQUENCY, T2D, [1, 3, 4, 0, 2], "absolute ids, rows re-sorted by token"),
        (BY_FREQUENCY, None, [1, 3, 4, 0, 2], "absolute ids, rows re-sorted by token, t2d derived"),
        ([11, 1, 1, 2, 4], T2D, [1, 2, 3, 4, 0], "offsets, rows re-sorted by token"),
        (SPECIALS_FIRST, T2D, [1, 2, 3, 4, 0], "absolute ids, rows re-sorted by token"),
        (None, T2D, [0, 1, 2, 3, 4], "t2d only, ascending"),
    ],
)
def test_every_dialect_of_one_head_gives_the_same_vocabulary(d2t, t2d, order, dialect: str) -> None:
    found = read(d2t, t2d)
    assert found.vocab.token_ids.tolist() == TOKENS
    assert found.order.tolist() == order
    assert found.dialect == dialect


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda t: torch.tensor(t, dtype=torch.int32)])
def test_lists_arrays_and_tensors_are_read_alike(make) -> None:
    assert read(make(OFFSETS), make([int(x) for x in T2D])).vocab.token_ids.tolist() == TOKENS


def test_rows_follow_their_token() -> None:
    rows = np.array([token * 10 for token in BY_FREQUENCY])
    assert rows[read(BY_FREQUENCY, T2D).order].tolist() == [20, 30, 50, 80, 110]


def test_only_ascending_offsets_are_canonical() -> None:
    assert read(OFFSETS, T2D).is_canonical
    assert not read(TOKENS, T2D).is_canonical
    assert not read([8, 1, 9, 0, 1], T2D).is_canonical


def test_a_long_absolute_table_without_t2d_is_recognised() -> None:
    tokens = np.arange(0, 4000, 2)
    found = read(tokens, rows=2000, vocab_size=8000)
    assert found.dialect == "absolute ids, ascending, t2d derived"
    assert found.vocab.token_ids[-1] == 3998


@pytest.mark.parametrize("t2d", [None, [True] * 4, [False] * 4])
@pytest.mark.parametrize("d2t", [None, [0, 0, 0, 0]])
def test_a_full_head_needs_no_map(d2t, t2d) -> None:
    found = read(d2t, t2d, rows=4, vocab_size=4)
    assert found.vocab.is_full
    assert found.order.tolist() == [0, 1, 2, 3]
    assert found.dialect.startswith("full vocabulary")


def test_zero_offsets_with_a_mask_of_the_first_tokens_are_those_tokens() -> None:
    found = read([0, 0, 0], [True] * 3 + [False] * 9, rows=3)
    assert found.vocab.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("d2t", "t2d", "rows", "message"),
    [
        # More rows than entries, fewer rows than entries.
        (OFFSETS, T2D, 6, "lm_head has 6 rows but d2t has 5 entries"),
        (OFFSETS, None, 4, "lm_head has 4 rows but d2t has 5 entries"),
        # Nothing says which tokens the rows are.
        (None, None, 5, "5 rows for 12 tokens and no d2t says which"),
        (None, T2D, 4, "4 rows for 12 tokens and no d2t says which"),
        ([0] * 5, None, 5, "all zeros for 5 rows of 12 tokens and there is no t2d"),
        # Two maps that contradict each other.
        ([0] * 5, T2D, 5, r"name different tokens \(d2t 5, t2d 5\)"),
        ([2, 2, 3, 5, 6], T2D, 5, "name different tokens"),
        (OFFSETS, [True] * 12, 5, r"name different tokens \(d2t 5, t2d 12\)"),
        ([0] * 12, T2D, 12, r"d2t and t2d name different tokens \(d2t 12, t2d 5\)"),
        # No map by any reading.
        ([2, 2, 3, 5, 8], None, 5, "neither as offsets nor as absolute ids"),
        ([2, 1, 2, 5, 7], None, 5, "neither as offsets nor as absolute ids"),
        ([-1, 2, 3, 5, 7], T2D, 5, "neither as offsets nor as absolute ids"),
        # Both readings are maps, and nothing decides.
        ([4, 2, 0, 5, 6], None, 5, "as offsets and as absolute ids, and there is no t2d"),
        # A mask of another verifier.
        (OFFSETS, [*T2D, False], 5, "t2d has 13 entries, the verifier has 12 tokens"),
        # Rounded by a floating-point format.
        ([2.0, 2.0, 3.0, 5.0, 7.0], T2D, 5, "d2t is of type float64, expected integers"),
    ],
)
def test_a_map_that_would_be_a_guess_is_refused(d2t, t2d, rows: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^head/: .*{message}"):
        read(d2t, t2d, rows=rows)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_order_of_any_head_is_sorted_into_the_same_vocabulary(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(2, 60))
    tokens = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=vocab_size, unique=True))
    absolute = data.draw(st.booleans())
    table = tokens if absolute else [token - row for row, token in enumerate(tokens)]
    t2d = [token in tokens for token in range(vocab_size)]
    if len(tokens) == vocab_size and not any(table):
        tokens = list(range(vocab_size))
    found = read(table, t2d, rows=len(tokens), vocab_size=vocab_size)
    assert found.vocab.token_ids.tolist() == sorted(tokens)
    assert [tokens[row] for row in found.order] == sorted(tokens)
