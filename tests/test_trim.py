"""What is trimmed is never read: rows, counts, and losses that do not change by a bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from common import dataset, drafter, head_flags, manifest, trim
from common.draft_vocab import DraftVocab
from common.hidden_states import HiddenStateStore
from common.trim import Kept
from common.verifier import Verifier

K = 3


def write_rows(folder: Path, masks: list[str]) -> Path:
    rows: list[dataset.TrainingRow] = [
        {
            "input_ids": [100 * number + position for position in range(len(mask))],
            "loss_mask": [int(one) for one in mask],
            "seq_len": len(mask),
            "id": f"p{number}#0",
            "source": "s",
        }
        for number, mask in enumerate(masks)
    ]
    dataset.write(folder, rows)
    return folder


MASKS = ["0001100", "0000000", "1000000", "000000011", "01", "0011001000"]


def test_rows_end_with_their_last_supervised_token(tmp_path: Path) -> None:
    kept = Kept.supervised(dataset.load(write_rows(tmp_path, MASKS)), None)
    # Rows 1 and 2 have no loss: nothing predicts token 0.
    assert kept.rows.tolist() == [0, 3, 4, 5]
    assert kept.start.tolist() == [0, 0, 0, 0]
    assert kept.stop.tolist() == [5, 9, 2, 7]


def test_context_counts_from_the_first_supervised_token(tmp_path: Path) -> None:
    kept = Kept.supervised(dataset.load(write_rows(tmp_path, MASKS)), 2)
    assert kept.start.tolist() == [1, 5, 0, 0]
    assert kept.stop.tolist() == [5, 9, 2, 7]


def test_counts_reconcile_in_rows_and_tokens(tmp_path: Path) -> None:
    lengths = [7, 7, 7, 9, 2, 10]
    kept = Kept.supervised(dataset.load(write_rows(tmp_path, MASKS)), 2)
    counts = kept.counts(lengths)
    assert counts == {
        "read": 6,
        "written": 4,
        "dropped": {"no_supervised_token": 2},
        "tokens": {
            "read": 42,
            "written": 17,
            "in_rows_without_supervised": 14,
            "after_the_last_supervised": 5,
            "before_the_context": 6,
        },
    }
    import numpy as np

    fitted = kept.fitted_counts(counts, np.array([0, 2]))
    assert (fitted["written"], fitted["dropped"]) == (2, {"no_supervised_token": 2, "no_space": 2})
    assert (fitted["tokens"]["written"], fitted["tokens"]["no_space"]) == (6, 11)


def test_what_is_written_is_a_data_set_that_knows_where_it_came_from(tmp_path: Path) -> None:
    data = dataset.load(write_rows(tmp_path / "dataset", MASKS))
    kept = Kept.supervised(data, 2)
    making = manifest.Manifest("03_capture_hidden", config={"trim": True}, inputs={"dataset": "x"})
    making.counts = kept.counts([7, 7, 7, 9, 2, 10])
    trim.write(tmp_path / "rows", data, kept, making)
    rows = dataset.load(tmp_path / "rows")
    assert rows[1]["input_ids"].tolist() == [305, 306, 307, 308]
    assert rows[1]["loss_mask"].tolist() == [0, 0, 1, 1]
    assert rows.with_format(None)["id"] == ["p0#0", "p3#0", "p4#0", "p5#0"]
    assert rows.with_format(None)["row"] == [0, 3, 4, 5]
    again = trim.recorded(tmp_path / "rows", making, accept_stale=False)
    assert again is not None
    assert (again.rows.tolist(), again.start.tolist(), again.stop.tolist()) == (
        [0, 3, 4, 5],
        [1, 5, 0, 0],
        [5, 9, 2, 7],
    )
    making.inputs = {"dataset": "y"}
    assert trim.recorded(tmp_path / "rows", making, accept_stale=False) is None
    assert trim.recorded(tmp_path / "rows", making, accept_stale=True) is not None


def batch_of(folder: Path, states: Path, row: int) -> dict[str, Any]:
    """A row alone in a batch of 512, as speculators makes it."""
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    data = ArrowDataset(
        512, folder, FileTransfer(states), on_missing="raise", hidden_states_dtype=torch.float32
    )
    return CollateFn(512, 576, 3, torch.float32, shift_batch)([data[row]])


@pytest.fixture(scope="module")
def tiny_drafter(verifier_dir: Path) -> Any:
    parser = argparse.ArgumentParser()
    head_flags.add_layer_arguments(parser)
    flags = parser.parse_args(
        ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "32", "--intermediate-size", "64"]
    )
    torch.manual_seed(0)
    verifier = Verifier(str(verifier_dir))
    config = drafter.new_config(
        drafter.transformer_of(verifier, flags),
        verifier,
        layer_ids=[2, 15, 27],
        draft_vocab_size=512,
        speculative_tokens=K,
    )
    import numpy as np

    return drafter.build(config, DraftVocab(np.arange(512), 49152), verifier)


def test_no_loss_and_no_gradient_changes_by_a_bit_without_the_tail(
    captured_run: Path, tiny_drafter: Any, tmp_path: Path
) -> None:
    """Float32 on a CPU, every TTT step; the last nine tokens of real answers are made a tail."""
    source, store = (
        dataset.load(captured_run / "dataset"),
        HiddenStateStore(captured_run / "hidden_states", 576),
    )
    rows: list[dataset.TrainingRow] = []
    for row in source.with_format(None).select(range(2)):
        rows.append(dict(row) | {"loss_mask": row["loss_mask"][:-9] + [0] * 9})  # type: ignore[arg-type]
    dataset.write(tmp_path / "dataset", rows)
    data = dataset.load(tmp_path / "dataset")
    kept = Kept.supervised(data, None)
    trim.write(tmp_path / "rows", data, kept, manifest.Manifest("03_capture_hidden", config={}))
    (tmp_path / "states").mkdir()
    trimmed = HiddenStateStore(tmp_path / "states", 576)
    for row in range(2):
        ids, states = store.read(row)
        assert kept.stop[row] == len(ids) - 9
        trimmed.write(row, ids[:-9].clone(), states[:-9].clone())
    kwargs, _ = type(tiny_drafter).get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=K, ttt_step_loss_decay=1.0
    )
    for row in range(2):
        found = []
        for folder, states in ((tmp_path / "dataset", store.folder), (tmp_path / "rows", trimmed.folder)):
            batch = {k: v for k, v in batch_of(folder, states, row).items() if isinstance(v, torch.Tensor)}
            tiny_drafter.zero_grad()
            _, loss, metrics = tiny_drafter(**batch, **kwargs)
            loss.backward()
            gradients = [p.grad.clone() for p in tiny_drafter.parameters() if p.grad is not None]
            found.append((metrics, gradients))
        (metrics, gradients), (other, others) = found
        assert metrics["loss_sum"] > 1
        assert metrics.keys() == other.keys()
        assert all(torch.equal(metrics[name], other[name]) for name in metrics)
        assert all(torch.equal(one, two) for one, two in zip(gradients, others, strict=True))
