"""Hidden states from transformers in this process, for verifiers that fit beside everything else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from common.hidden_states import MOST_LOGITS, CaptureRow, Check, Damaged, HiddenStateStore, Outcome

if TYPE_CHECKING:
    from common.verifier import Verifier


class TransformersBackend:
    """Forward passes over batches of rows of like length.

    Args:
        verifier: loaded whole.
        store: where the states go.
        layer_ids: the three aux ids and N; id L is the output of the L-th layer, so N is before the norm.
        dtype: of the computation.
        batch_tokens: rows x longest row of a batch, in tokens.
    """

    def __init__(
        self,
        verifier: Verifier,
        store: HiddenStateStore,
        layer_ids: Sequence[int],
        dtype: torch.dtype,
        batch_tokens: int,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        self._store = store
        self._layer_ids = layer_ids
        self._batch_tokens = batch_tokens
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        auto: Any = AutoModelForImageTextToText if verifier.is_multimodal else AutoModelForCausalLM
        model = auto.from_pretrained(
            verifier.name,
            revision=verifier.revision,
            trust_remote_code=verifier.trust_remote_code,
            dtype=dtype,
        )
        self._model = model.to(self._device).eval()
        self._head = self._model.get_output_embeddings()

    async def capture(
        self, rows: Iterable[CaptureRow], check: Check | None, *, predict: bool = False
    ) -> AsyncIterator[tuple[CaptureRow, Outcome]]:
        """As `hidden_states.Backend`."""
        for batch in batches(rows, self._batch_tokens):
            for row, states, predicted in await asyncio.to_thread(self._forward, batch, predict):
                yield row, await asyncio.to_thread(self._keep, row, states, predicted, check)

    def _keep(
        self, row: CaptureRow, states: torch.Tensor, said: torch.Tensor, check: Check | None
    ) -> Outcome:
        kept, states = row.kept, states[row.start :]
        try:
            with self._store.storing(row.index, kept.token_ids, states) as stored:
                if check is not None:
                    check(kept, stored, said[row.start :])
        except Damaged as error:
            return error
        return None

    @torch.inference_mode()
    def _forward(
        self, batch: list[CaptureRow], predict: bool
    ) -> list[tuple[CaptureRow, torch.Tensor, torch.Tensor]]:
        # Padding stands on the right, where no earlier token attends to it: no mask is needed.
        padded = torch.nn.utils.rnn.pad_sequence([row.token_ids for row in batch], batch_first=True)
        with self._outputs() as outputs:
            normed = self._model.get_decoder()(padded.to(self._device), use_cache=False).last_hidden_state
        states = torch.stack([outputs[layer].to(torch.bfloat16).cpu() for layer in self._layer_ids], dim=2)
        found = []
        for number, row in enumerate(batch):
            end = len(row.token_ids)
            said = torch.full_like(row.token_ids, -1)
            for asked in [slice(0, min(end, MOST_LOGITS))] * predict + [slice(end - 1, end)]:
                said[asked] = self._head(normed[number, asked]).argmax(-1).cpu()
            found.append((row, states[number, :end], said))
        return found

    @contextmanager
    def _outputs(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect the wanted layers' outputs [B, T, H] of the forward pass inside the block."""
        found: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: object, _inputs: object, output: Any) -> None:
                found[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        layers = self._model.get_decoder().layers
        handles = [layers[layer - 1].register_forward_hook(keep(layer)) for layer in self._layer_ids]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def batches(rows: Iterable[CaptureRow], batch_tokens: int) -> Iterator[list[CaptureRow]]:
    """Group rows in their order; rows x longest row stays within `batch_tokens`, with at least one row."""
    batch: list[CaptureRow] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row.token_ids))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], len(row.token_ids)
        batch.append(row)
    if batch:
        yield batch
