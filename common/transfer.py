"""Reads a store for speculators' training data set, whatever form its files have."""

from __future__ import annotations

import torch
from hs_connectors import FileTransfer

from common.hidden_states import HiddenStateStore


class StoreTransfer(FileTransfer):
    """A store's rows as `ArrowDataset` wants them; a file of another form stops the run by name.

    Args:
        store: what `03_capture_hidden.py` filled.
    """

    def __init__(self, store: HiddenStateStore) -> None:
        super().__init__(store.folder)
        self._store = store

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """A row's `token_ids [T]` int64 and `hidden_states [T, A+1, H]` bfloat16; None where it has no file.

        Raises:
            Damaged: the file cannot be read, or has another form than the store.
        """
        if not self._store.path(file_idx).exists():
            return None
        token_ids, states = self._store.read(file_idx)
        return {"token_ids": token_ids, "hidden_states": states}
