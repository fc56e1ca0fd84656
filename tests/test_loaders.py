"""Which rows train, which are held out, what is packed, and what the held-out check counts for whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common import dataset, loaders
from common.errors import InputError, StageError
from common.hidden_states import HiddenStateStore
from common.loaders import TrainingRows
from common.store_forms import StoreForm

H = 8


def write_run(folder: Path, rows: list[tuple[str, str, int, list[int]]]) -> Path:
    """Rows `(id, source, length, supervised positions)` with states of size 8 that tell the row's number."""
    training_rows: list[dataset.TrainingRow] = []
    (folder / "hidden_states").mkdir(parents=True)
    for number, (row_id, source, length, supervised) in enumerate(rows):
        ids = [number * 100 + position for position in range(length)]
        mask = [int(position in supervised) for position in range(length)]
        training_rows.append(
            {"input_ids": ids, "loss_mask": mask, "seq_len": length, "id": row_id, "source": source}
        )
        states = torch.full((length, 4, H), number + 1.0, dtype=torch.bfloat16)
        save_file(
            {"hidden_states": states, "token_ids": torch.tensor(ids)},
            folder / "hidden_states" / f"hs_{number}.safetensors",
        )
    dataset.write(folder / "dataset", training_rows)
    return folder


def opened(folder: Path, *, failed: tuple[int, ...] = (), total_seq_len: int = 12, eval_ratio: float = 0.4):
    return TrainingRows.open(
        folder / "dataset",
        HiddenStateStore(folder / "hidden_states", H),
        failed=failed,
        total_seq_len=total_seq_len,
        eval_ratio=eval_ratio,
    )


def test_a_conversation_is_never_on_both_sides(tmp_path: Path) -> None:
    ids = ["a#0", "b#0", "c#0", "c#1", "c#2", "d#0"]
    run = write_run(tmp_path, [(one, "s", 4, [2, 3]) for one in ids])
    rows = opened(run, eval_ratio=0.4)  # 6 x 0.6 = 3.6: the cut at 4 would part c
    assert rows.trained.tolist() == [0, 1]
    assert rows.held_out.tolist() == [2, 3, 4, 5]


def test_ids_without_a_turn_are_their_own_conversations(tmp_path: Path) -> None:
    run = write_run(tmp_path, [(one, "s", 4, [2, 3]) for one in "abcde"])
    assert opened(run, eval_ratio=0.2).held_out.tolist() == [4]


def test_rows_without_states_or_without_loss_take_no_part_and_are_counted(tmp_path: Path) -> None:
    rows = [
        ("a", "s", 5, [3, 4]),
        ("b", "s", 5, []),  # nothing supervised
        ("c", "s", 30, [29]),  # supervised beyond the 12 tokens of a batch
        ("d", "s", 5, [0]),  # only the first token: nothing predicts it
        ("e", "s", 5, [3]),
        ("f", "s", 5, [3]),
    ]
    run = write_run(tmp_path, rows)
    (run / "hidden_states" / "hs_4.safetensors").unlink()
    found = opened(run, failed=(4,), eval_ratio=0.2)
    assert found.trained.tolist() == [0]
    assert found.held_out.tolist() == [5]
    assert found.counts() == {
        "read": 6,
        "written": 1,
        "dropped": {"held_out": 1, "no_supervised_token": 3},
        "failed": 1,
    }


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, [(one, "s", 4, [2]) for one in "abc"])
    (run / "hidden_states" / "hs_1.safetensors").unlink()
    with pytest.raises(InputError, match=r"hs_1\.safetensors: absent.*1 such rows.*03_capture_hidden"):
        opened(run)


def test_a_part_without_rows_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, [("a", "s", 4, [2]), ("b", "s", 4, [])])
    with pytest.raises(InputError, match=r"no held-out rows: 2 rows, --eval-ratio 0\.4"):
        opened(run)


def test_a_batch_is_what_speculators_makes_of_exactly_our_rows(tmp_path: Path) -> None:
    rows = [("a", "s", 5, [2, 3, 4]), ("b", "s", 5, []), ("c", "s", 6, [4, 5]), ("d", "s", 4, [3])]
    found = opened(write_run(tmp_path, rows), eval_ratio=0.25)
    train, held_out = found.loaders(total_seq_len=12, dtype=torch.float32, num_workers=0, seed=0)
    (batch,) = list(train)
    # Rows 0 and 2, longest first, each shifted: token t + 1 beside the states of t; row 1 has no part.
    assert loaders.rows_of_batch(train, 0, 0) == [2, 0]
    assert batch["input_ids"].tolist() == [[201, 202, 203, 204, 205, 1, 2, 3, 4, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 0, 0, 0]]
    assert batch["hidden_states"].shape == (1, 12, 3 * H)
    assert batch["verifier_last_hidden_states"][0, :, 0].tolist() == [3.0] * 5 + [1.0] * 4 + [0.0] * 3
    (other,) = list(held_out)
    assert loaders.rows_of_batch(held_out, 0, 0) == [3]
    assert other["input_ids"][0, :3].tolist() == [301, 302, 303]


@pytest.mark.parametrize("form", [StoreForm("fp8"), StoreForm("mixed", "zstd")], ids=str)
def test_another_form_of_the_store_gives_the_same_batches(tmp_path: Path, form: StoreForm) -> None:
    run = write_run(tmp_path, [(f"r{i}", "s", 5, [3]) for i in range(6)])
    plain = HiddenStateStore(run / "hidden_states", H)
    stored = [(ids, states.clone()) for ids, states in map(plain.read, range(6))]
    packed = replace(plain, form=form)
    before = list(opened(run).loaders(total_seq_len=12, dtype=torch.float32, num_workers=0, seed=0)[0])
    for row, (token_ids, states) in enumerate(stored):
        packed.write(row, token_ids, states)
    with pytest.raises(InputError, match=r"absent, or not bfloat16 states of its row's length.*6 such rows"):
        opened(run)
    rows = TrainingRows.open(run / "dataset", packed, failed=(), total_seq_len=12, eval_ratio=0.4)
    after = list(rows.loaders(total_seq_len=12, dtype=torch.float32, num_workers=0, seed=0)[0])
    assert len(after) == len(before)
    for mine, theirs in zip(after, before, strict=True):
        # The states are small whole numbers, which fp8 has exactly.
        assert all(torch.equal(mine[name], theirs[name]) for name in mine if name != "error_records")


def test_a_batch_without_a_supervised_token_is_an_error_that_names_its_rows(tmp_path: Path) -> None:
    """Rows are chosen by their masks; this is a data set that was changed under a run."""
    rows = opened(write_run(tmp_path, [(f"{one}#0", "chat", 5, [3]) for one in "abc"]))
    train, _ = rows.loaders(total_seq_len=12, dtype=torch.float32, num_workers=0, seed=0)
    (batch,) = list(train)
    loaders.require_whole(batch, rows, [0, 1])
    batch["loss_mask"].zero_()
    with pytest.raises(StageError, match=r"no token .* \(row 0 \(a#0, chat\), row 1 \(b#0, chat\)\)"):
        loaders.require_whole(batch, rows, [0, 1])


def test_the_order_of_rows_is_the_seeds_and_changes_with_the_epoch(tmp_path: Path) -> None:
    run = write_run(tmp_path, [(f"r{i}", "s", 5, [3]) for i in range(40)])
    rows = opened(run, eval_ratio=0.1)

    def order(seed: int, epoch: int) -> list[list[int]]:
        train, _ = rows.loaders(total_seq_len=12, dtype=torch.float32, num_workers=0, seed=seed)
        return [loaders.rows_of_batch(train, epoch, index) for index in range(18)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(row for batch in order(0, 1) for row in batch) == list(range(36))
