"""Training rows with their states: which take part, speculators' loaders of them, and the held-out check."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import dataloader
from speculators.train.recovery import RECOVERY_METADATA_KEY
from torch.utils.data import DataLoader

from common import acceptance, dataset, log, partition, trim
from common.acceptance import Acceptance
from common.errors import InputError, StageError
from common.hidden_states import HiddenStateStore
from common.online import OnlineStates
from common.shards import Shard
from common.transfer import StoreTransfer
from common.verifier import Verifier

if TYPE_CHECKING:
    import datasets

_LOG = log.get("loaders")
_REQUEST_TIMEOUT_S = 600.0
_REQUEST_RETRIES = 3
_FLEX_BLOCK = 128
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a data set, their states, and how they part into trained and held-out ones.

    Attributes:
        folder: the data set.
        store: its captured states.
        ids: of each row.
        sources: of each row.
        boundary: rows before it train, the others are held out.
        shards: the rows before it, in the parts that train one after the other; one part has them all.
        failed: rows without states, as 03 recorded them.
        unsupervised: rows whose first `total_seq_len` tokens hold nothing to learn.
        online: the server that the states come from; None where they are stored.
    """

    folder: Path
    store: HiddenStateStore
    ids: Sequence[str]
    sources: Sequence[str]
    boundary: int
    shards: Sequence[Rows]
    failed: Rows
    unsupervised: Rows
    online: OnlineStates | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        store: HiddenStateStore,
        failed: Sequence[int],
        total_seq_len: int,
        eval_ratio: float,
        shard: Shard | None = None,
        online: OnlineStates | None = None,
    ) -> TrainingRows:
        """Read ids, sources and masks, and look for each row's file.

        Args:
            folder: `dataset/`.
            store: `hidden_states/`.
            failed: rows that the capture gave up.
            total_seq_len: tokens of a packed batch; longer rows are cut there.
            eval_ratio: share of the rows to hold out, from the end.
            shard: whose states must be there, beside those of the held-out rows; None needs all.
            online: a server that gives them; then no file is looked for.

        Raises:
            InputError: states are missing, or one of the two parts would be empty.
        """
        rows = dataset.load(folder)
        plain = rows.with_format(None)
        lengths = dict(enumerate(plain["seq_len"]))
        ids = dataset.ids(rows)
        boundary = partition.held_out_from(ids, eval_ratio)
        shards = [np.arange(boundary)]
        if shard:
            shards = partition.into_shards(ids[:boundary], plain["seq_len"][:boundary], shard.count)
            trained_now = set(shards[shard.number - 1].tolist())
            lengths = {row: n for row, n in lengths.items() if row >= boundary or row in trained_now}
        missing = [] if online else sorted(lengths.keys() - store.done(lengths) - set(failed))
        if missing:
            command = "03_capture_hidden.py again"
            if shard:
                command = f"03_capture_hidden.py --shard {shard} (with --overwrite, if it was trained before)"
            raise InputError(
                f"{store.path(missing[0])}: absent, or not {store.form} states of its row's length, as the "
                f"manifest promises ({len(missing)} such rows). Run {command}; it captures what is missing."
            )
        sources = plain["source"] if "source" in plain.column_names else ["all"] * len(rows)
        unsupervised = _rows_without_loss(rows, total_seq_len)
        failures = np.array(failed, np.int64)
        found = cls(folder, store, ids, list(sources), boundary, shards, failures, unsupervised, online)
        for name, part in (("trained", found.trained), ("held-out", found.held_out)):
            if not len(part):
                raise InputError(
                    f"{folder} leaves no {name} rows: {len(rows)} rows, --eval-ratio {eval_ratio}, "
                    f"{len(failed)} without states, {len(unsupervised)} without a supervised token in the "
                    f"first {total_seq_len}. Make more rows, or raise --total-seq-len."
                )
        return found

    @property
    def left_out(self) -> Rows:
        """Rows that take no part."""
        return np.union1d(self.failed, self.unsupervised)

    @property
    def trained(self) -> Rows:
        """Rows that train."""
        return np.setdiff1d(np.arange(self.boundary), self.left_out)

    @property
    def held_out(self) -> Rows:
        """Rows that are only measured."""
        return np.setdiff1d(np.arange(self.boundary, len(self.sources)), self.left_out)

    def named(self, rows: Sequence[int]) -> str:
        """Rows as an error names them: `row 3 (0003#0, code_math), row 7 (...)`."""
        return ", ".join(f"row {row} ({self.ids[row]}, {self.sources[row]})" for row in rows)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token in a batch: its states, and ids, mask, position and document in int64."""
        return (self.store.num_aux + 1) * self.store.hidden_size * dtype.itemsize + 4 * torch.int64.itemsize

    def counts(self) -> dict[str, Any]:
        """Where each row went, for the manifest."""
        unsupervised = np.setdiff1d(self.unsupervised, self.failed)
        return {
            "read": len(self.sources),
            "written": len(self.trained),
            "dropped": {"held_out": len(self.held_out), "no_supervised_token": len(unsupervised)},
            "failed": len(self.failed),
        }

    def loaders(
        self,
        *,
        total_seq_len: int,
        dtype: torch.dtype,
        num_workers: int,
        seed: int,
        epochs: int = 1,
        prefetch: int = 4,
    ) -> tuple[DataLoader, DataLoader]:
        """speculators' loaders of the trained and of the held-out rows, packed into batches.

        Args:
            total_seq_len: tokens of a batch.
            dtype: of the states in a batch.
            num_workers: reading processes; 0 reads in this one.
            seed: of the order of the trained rows, the same on every process.
            epochs: passes over each shard.
            prefetch: batches that each reading process has ready.
        """
        both = dataloader.create_train_val_loaders(
            data_path=str(self.folder),
            total_seq_len=total_seq_len,
            hidden_states_dtype=dtype,
            transfer=self.online.transfer if self.online else StoreTransfer(self.store),
            on_missing="generate" if self.online else "raise",
            hidden_size=self.store.hidden_size,
            num_target_layers=self.store.num_aux,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            preprocess=shift_batch,
            # speculators splits at int(rows x ratio); the half keeps that away from rounding.
            train_data_ratio=(self.boundary + 0.5) / len(self.sources),
            seed=seed,
            # Asked only where states are not stored. A row that cannot be had ends the run: without it the
            # batches would be others than a resumed run's.
            vllm_endpoint=self.online.url if self.online else "",
            verifier_name_or_path="",
            request_timeout=_REQUEST_TIMEOUT_S,
            max_retries=_REQUEST_RETRIES,
            generation_validation_retries=1,
            max_consecutive_generation_failures=1,
        )
        for loader, rows, first in zip(both, (self.trained, self.held_out), (0, self.boundary), strict=True):
            sampler: Any = loader.batch_sampler
            sampler.valid_indices = rows - first
            if num_workers:
                loader.worker_init_fn = _start_worker
        if len(self.shards) > 1:
            _follow_shards(both[0], [np.intersect1d(rows, self.trained) for rows in self.shards], epochs)
        return both


def _follow_shards(loader: DataLoader, shards: Sequence[Rows], epochs: int) -> None:
    """Let the loader's sampler give `epochs` passes over each shard, one shard after the other."""
    sampler: Any = loader.batch_sampler
    batches_of_valid = sampler._generate_batches

    def batches(epoch: int) -> list[Rows]:
        sampler.valid_indices = shards[epoch // epochs]
        found: list[Rows] = batches_of_valid(epoch)
        return found

    sampler._generate_batches = batches


def _rows_without_loss(rows: datasets.Dataset, total_seq_len: int) -> Rows:
    """Rows whose part that fits a batch has no loss; position 0 never has: nothing predicts it."""
    found = [row for row, mask in enumerate(trim.masks(rows)) if not mask[1 : total_seq_len + 1].any()]
    return np.array(found, np.int64)


def _start_worker(worker_id: int) -> None:
    dataloader._worker_init_fn(worker_id)
    # Ctrl-C reaches the whole group: the trainer saves a checkpoint, and needs no torn-down workers for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def single_rows(
    store: HiddenStateStore, data: datasets.Dataset, columns: Sequence[int]
) -> Iterator[dict[str, torch.Tensor]]:
    """Each captured row as a batch of its own, with some of its aux states.

    Args:
        store: rows that it lacks are passed over.
        data: the data set that the states were captured from.
        columns: which of the store's aux states, in the drafter's order.

    Yields:
        As speculators collates a batch, states in float32.
    """
    for row in sorted(store.done(dict(enumerate(data.with_format(None)["seq_len"])))):
        token_ids, states = store.read(row)
        shifted = shift_batch(
            {
                "input_ids": token_ids,
                "hidden_states": states[:, list(columns)].float().flatten(1),
                "verifier_last_hidden_states": states[:, -1].float(),
                "loss_mask": data[row]["loss_mask"],
                "lengths": torch.tensor([len(token_ids)]),
                "position_ids": torch.arange(len(token_ids)),
            }
        )
        del shifted["lengths"]
        shifted["document_ids"] = torch.zeros_like(shifted["input_ids"])
        # Flex attention's masks are made of blocks; -1 marks padding, as in speculators' batches.
        padding = -len(shifted["input_ids"]) % _FLEX_BLOCK
        fill = {"document_ids": -1}
        yield {
            name: torch.cat([t, t.new_full((padding, *t.shape[1:]), fill.get(name, 0))])[None]
            for name, t in shifted.items()
        }


def rows_of_batch(loader: DataLoader, epoch: int, index: int) -> list[int]:
    """Rows of the data set in the batch of that index, in the order of its `document_ids`."""
    sampler: Any = loader.batch_sampler
    held: Any = loader.dataset
    return [int(row) + held.start_file_idx for row in sampler._generate_batches(epoch)[index]]


def require_whole(batch: dict[str, Any], rows: TrainingRows, numbers: list[int]) -> None:
    """Stop at a batch that speculators' data set filled with less than its rows, or with nothing to learn.

    Args:
        batch: as collated.
        rows: of the data set.
        numbers: which of them the batch was made of.

    Raises:
        StageError: a row's states hold other token ids than the row, or no token is supervised.
    """
    recovery = batch.pop(RECOVERY_METADATA_KEY, None)
    if recovery is not None and recovery.failure_count:
        raise StageError(
            f"the server gave no states of {recovery.failure_count} rows of a batch: {recovery.error}. When "
            "it answers again, the same command goes on from the newest checkpoint."
        )
    if batch["error_records"]:
        raise StageError(
            f"{batch['error_records']} rows of a batch have states of other token ids than their own "
            f"({rows.named(numbers)}): dataset/ and hidden_states/ no longer belong together. Run "
            "`03_capture_hidden.py --verify`, then `03_capture_hidden.py --overwrite`."
        )
    if not batch["loss_mask"].any():
        raise StageError(
            f"no token of a batch is supervised ({rows.named(numbers)}), though each of its rows had one "
            "when the run began: its loss would be 0 and its step would only decay the weights. dataset/ was "
            "changed since. Make it again with 01b_generate_synthetic.py or 01_prepare_data.py."
        )


@dataclass
class HeldOut:
    """Measures acceptance on the held-out rows; the verifier's choices are computed once and kept.

    Attributes:
        rows: gives the source of each row.
        loader: of the held-out rows, in one fixed order.
        verifier: gives the lm_head of the first pass.
        ttt_steps: K.
    """

    rows: TrainingRows
    loader: DataLoader
    verifier: Verifier
    ttt_steps: int
    _choices: list[torch.Tensor] = field(default_factory=list, init=False)

    def measure(self, model: Eagle3DraftModel) -> Acceptance:
        """All held-out rows together, those of other processes included."""
        return acceptance.total(self.by_source(model).values())

    def by_source(self, model: Eagle3DraftModel) -> dict[str, Acceptance]:
        """Acceptance for each source of the held-out rows."""
        was_training = model.training
        model.eval()
        names = self._names
        counts = torch.zeros(len(names), 1 + self.ttt_steps, dtype=torch.int64, device=model.device)
        with log.bar(len(self.loader), unit="batches", description="held-out rows") as bar:
            for index, (batch, choices) in enumerate(self._batches(model)):
                labels = [names.index(self.rows.sources[row]) for row in rows_of_batch(self.loader, 0, index)]
                counted = acceptance.count_accepted(model, batch, choices, self.ttt_steps)
                counts.index_add_(0, torch.tensor(labels, device=model.device)[: len(counted)], counted)
                bar.update()
        if dist.is_initialized():
            dist.all_reduce(counts)
        model.train(was_training)
        parts = zip(names, counts.tolist(), strict=True)
        return {name: Acceptance(drafts, tuple(accepted)) for name, (drafts, *accepted) in parts}

    def coverage(self, model: Eagle3DraftModel) -> float | None:
        """Share of the verifier's choices that the draft vocabulary has; None before the first measure."""
        if not self._choices:
            return None
        if model.t2d is None:
            return 1.0
        chosen = torch.cat([choices[choices >= 0] for choices in self._choices]).to(model.device)
        counts = torch.stack([model.t2d[chosen].sum(), torch.tensor(len(chosen), device=model.device)])
        if dist.is_initialized():
            dist.all_reduce(counts)
        known, all_of_them = counts.tolist()
        return known / all_of_them

    @cached_property
    def _names(self) -> list[str]:
        return sorted({self.rows.sources[row] for row in self.rows.held_out})

    def _batches(self, model: Eagle3DraftModel) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        remembered = bool(self._choices)
        choose: Callable[[dict[str, Any]], torch.Tensor] | None = None
        if not remembered:
            # [V, H] float32 (4.7 GB at Kimi's size) for the first pass only.
            lm_head = self.verifier.tensor("lm_head").to(model.device).float()

            def choose(batch: dict[str, Any]) -> torch.Tensor:
                return acceptance.verifier_choices(model, batch, lm_head)

        for index, batch in enumerate(self.loader):
            require_whole(batch, self.rows, rows_of_batch(self.loader, 0, index))
            if choose is not None:
                self._choices.append(choose(batch).cpu())
            yield batch, self._choices[index].to(model.device)
