"""lm_head rows under another draft vocabulary: kept tokens keep theirs, new ones get the verifier's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.draft_vocab import DraftVocab, Ids

# Relative to the mean diagonal of the normal equations; 1e-6 to 1e-3 gave the same acceptance.
_RIDGE = 1e-3


@dataclass(frozen=True)
class Move:
    """What becomes of each row when the vocabulary changes.

    Attributes:
        kept: tokens in both vocabularies, ascending.
        new: tokens only in the new one.
        dropped: tokens only in the old one.
    """

    kept: Ids
    new: Ids
    dropped: Ids

    @classmethod
    def between(cls, old: DraftVocab, new: DraftVocab) -> Move:
        """Compare two vocabularies of one verifier."""
        return cls(
            np.intersect1d(old.token_ids, new.token_ids, assume_unique=True),
            np.setdiff1d(new.token_ids, old.token_ids, assume_unique=True),
            np.setdiff1d(old.token_ids, new.token_ids, assume_unique=True),
        )

    def counts(self) -> dict[str, int]:
        """Numbers of rows, for the report."""
        return {"kept": len(self.kept), "new": len(self.new), "dropped": len(self.dropped)}

    def shares(self, token_counts: Ids) -> dict[str, float]:
        """Share of the data's supervised tokens that each part carries.

        Args:
            token_counts: [V] int64, from 02.
        """
        total = max(int(token_counts.sum()), 1)
        parts = {"kept": self.kept, "new": self.new, "dropped": self.dropped}
        return {name: float(token_counts[ids].sum()) / total for name, ids in parts.items()}


def move_rows(
    trained: torch.Tensor, old: DraftVocab, new: DraftVocab, verifier_head: torch.Tensor
) -> torch.Tensor:
    """The head's rows in the order of the new vocabulary.

    Args:
        trained: [D_old, H], row i for the i-th smallest token of `old`.
        old: the checkpoint's vocabulary.
        new: the vocabulary to train with.
        verifier_head: [V, H], the verifier's lm_head.

    Returns:
        [D_new, H] float32. Rows of kept tokens are bit-equal to `trained`.
    """
    move = Move.between(old, new)
    rows = torch.empty(len(new), trained.shape[1], dtype=torch.float32)
    kept = torch.from_numpy(np.searchsorted(old.token_ids, move.kept))
    rows[torch.from_numpy(np.searchsorted(new.token_ids, move.kept))] = trained[kept].float()
    if len(move.new):
        fresh = verifier_head[torch.from_numpy(move.new)].float()
        if len(move.kept):
            frame = trained_frame(verifier_head[torch.from_numpy(move.kept)], trained[kept])
            fresh = fresh @ frame
        rows[torch.from_numpy(np.searchsorted(new.token_ids, move.new))] = fresh
    return rows


def trained_frame(verifier_rows: torch.Tensor, trained_rows: torch.Tensor) -> torch.Tensor:
    """The linear map that carries verifier rows into the trained head's frame, fitted on the kept tokens.

    Ridge regression: `M = argmin ||V M - W||^2 + r ||M||^2`, solved by the normal equations in float64.
    Verifier rows as they are draw the argmax away from trained rows: a trained head lives in another frame.
    Measured on the shared head at step 0 (1,750 rows kept, 2,346 new; acceptance length, K = 3): its own
    map 1.266, verifier rows as they are 1.185, plus the mean of (trained - verifier) over kept rows 1.250,
    this map 1.270. Regressing the verifier's logits of the new tokens on captured states gave 1.027, and
    1.269 when scaled to the kept rows (new rows then never win): the states add nothing.

    Args:
        verifier_rows: [K, H], the verifier's rows of the kept tokens.
        trained_rows: [K, H], the head's rows of the same tokens.

    Returns:
        M, [H, H] float32.
    """
    source, target = verifier_rows.double(), trained_rows.double()
    gram = source.T @ source
    ridge = _RIDGE * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    return torch.linalg.solve(gram, source.T @ target).float()
