"""lm_head rows under another draft vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from common.draft_vocab import DraftVocab
from common.head_rows import Move, move_rows, trained_frame

OLD = DraftVocab(np.array([1, 3, 5, 8]), vocab_size=10)
NEW = DraftVocab(np.array([0, 3, 4, 8]), vocab_size=10)


def test_head_rows_follow_their_token_when_the_map_changes() -> None:
    trained = torch.tensor([[1.0], [3.0], [5.0], [8.0]])
    moved = move_rows(trained, OLD, NEW, verifier_head=torch.arange(10.0)[:, None])
    assert moved[1].item() == 3.0
    assert moved[3].item() == 8.0


def test_kept_rows_are_bit_equal_to_the_trained_bfloat16_rows() -> None:
    trained = torch.randn(4, 6, dtype=torch.bfloat16)
    moved = move_rows(trained, OLD, NEW, verifier_head=torch.randn(10, 6))
    assert torch.equal(moved[[1, 3]].to(torch.bfloat16), trained[[1, 3]])


def test_new_rows_arrive_in_the_trained_frame() -> None:
    verifier_head = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1))).Q
    old = DraftVocab(np.arange(0, 400, 2), vocab_size=400)
    new = DraftVocab(np.arange(0, 400), vocab_size=400)
    moved = move_rows(verifier_head[::2] @ rotation, old, new, verifier_head)
    # The trained head is the verifier's, turned: so must the new rows be, up to the ridge.
    torch.testing.assert_close(moved[1::2], (verifier_head @ rotation)[1::2], rtol=0.02, atol=0.02)


def test_new_rows_are_the_verifiers_own_where_no_token_is_kept() -> None:
    other = DraftVocab(np.array([0, 2, 4]), vocab_size=10)
    moved = move_rows(torch.ones(4, 1), OLD, other, verifier_head=torch.arange(10.0)[:, None])
    assert moved.flatten().tolist() == [0.0, 2.0, 4.0]


def test_a_frame_of_fewer_tokens_than_dimensions_is_finite() -> None:
    frame = trained_frame(torch.randn(3, 16), torch.randn(3, 16))
    assert torch.isfinite(frame).all()


def test_a_move_counts_rows_and_their_share_of_the_tokens() -> None:
    move = Move.between(OLD, NEW)
    assert move.counts() == {"kept": 2, "new": 2, "dropped": 2}
    counts = np.array([10, 5, 0, 40, 10, 5, 0, 0, 30, 0])
    assert move.shares(counts) == {"kept": 0.7, "new": 0.2, "dropped": 0.1}
