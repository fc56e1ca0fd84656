"""A form of the store: what it keeps, what that takes, and who can read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hs_connectors import FileTransfer, FP8Transfer
from safetensors.torch import load_file, save_file

from common import dataset
from common.hidden_states import CaptureRow, Damaged, HiddenStateStore
from common.store_forms import COMPRESSIONS, PRECISIONS, StoreForm, from_fp8, to_fp8
from common.transfer import StoreTransfer

H = 64
T = 300  # more than the tokens that are rounded at once
FORMS = [StoreForm(dtype, compress) for dtype in PRECISIONS for compress in COMPRESSIONS]
LOSSY = [form for form in FORMS if form.dtype != "bfloat16"]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def states_of(length: int) -> torch.Tensor:
    """Each state on a scale of its own, as layers have, and one value far outside."""
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(length, 4, H, generator=generator) * torch.tensor([0.02, 1.0, 60.0, 900.0])[:, None]
    states[0, 2, 5] = 24_832.0  # as SmolLM2's first token
    return states.bfloat16()


def store_of(folder: Path, form: StoreForm) -> HiddenStateStore:
    return HiddenStateStore(folder, H, form=form)


def written(folder: Path, form: StoreForm, length: int = T) -> HiddenStateStore:
    store = store_of(folder, form)
    store.write(0, torch.arange(length), states_of(length))
    return store


# --------------------------------------------------------------------------------------------------------
# What is kept


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_bfloat16_is_kept_bit_by_bit(tmp_path: Path, compress: str) -> None:
    token_ids, states = written(tmp_path, StoreForm("bfloat16", compress)).read(0)
    assert token_ids.tolist() == list(range(T))
    assert torch.equal(states, states_of(T))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_compression_loses_nothing(tmp_path: Path, dtype: str) -> None:
    plain = written(tmp_path / "plain", StoreForm(dtype)).read(0)[1]
    packed = written(tmp_path / "packed", StoreForm(dtype, "zstd")).read(0)[1]
    assert torch.equal(plain, packed)


@pytest.mark.parametrize("form", LOSSY, ids=str)
def test_no_state_loses_more_than_a_twentyfifth(tmp_path: Path, form: StoreForm) -> None:
    states, kept = states_of(T).float(), written(tmp_path, form).read(0)[1].float()
    ordinary = torch.ones(T, dtype=torch.bool)
    ordinary[0] = False
    error = (kept - states).norm(dim=-1) / states.norm(dim=-1)
    assert error[ordinary].max() < 1 / 25
    # Beside a value of 400 times their size, the others of that state are kept all the same.
    beside = torch.arange(H) != 5
    assert (kept - states)[0, 2, beside].norm() < 0.1 * states[0, 2, beside].norm()
    assert kept[0, 2, 5] == pytest.approx(24_832, rel=1 / 16)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_mixed_keeps_the_last_state_bit_by_bit(tmp_path: Path, compress: str) -> None:
    kept = written(tmp_path, StoreForm("mixed", compress)).read(0)[1]
    assert torch.equal(kept[:, -1], states_of(T)[:, -1])
    assert not torch.equal(kept[:, :-1], states_of(T)[:, :-1])


def test_the_scale_is_the_power_of_two_above_sixteen_means(tmp_path: Path) -> None:
    states = torch.tensor([[[0.9] * 8, [3.0] * 8, [0.01] * 7 + [4480.0]]])
    rounded, scales = to_fp8(states)
    # 16 x 0.9 = 14.4; 16 x 3 = 48; 4480 / 448 = 10, and the mean of 560 asks for more: 16 x 560 = 8960.
    assert scales.flatten().tolist() == [16, 64, 16384]
    assert from_fp8(rounded, scales)[0, 1].tolist() == [3.0] * 8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_form
def test_what_is_not_finite_is_not_stored(tmp_path: Path, form: StoreForm, bad: float) -> None:
    states = states_of(T)
    states[290, 1, 3] = bad
    store = store_of(tmp_path, form)
    with pytest.raises(Damaged, match="state 1 at position 290: a value is not finite, as in 1 of 1200"):
        store.write(0, torch.arange(T), states)
    assert not list(tmp_path.iterdir())


@every_form
def test_what_a_check_sees_is_what_will_be_read(tmp_path: Path, form: StoreForm) -> None:
    store = store_of(tmp_path, form)
    with store.storing(0, torch.arange(T), states_of(T)) as seen:
        assert not store.path(0).exists()
    assert torch.equal(seen, store.read(0)[1])


@every_form
def test_a_servers_file_is_kept_in_the_stores_form(tmp_path: Path, form: StoreForm) -> None:
    file = tmp_path / "cmpl-1.safetensors"
    save_file({"hidden_states": states_of(T), "token_ids": torch.arange(T)}, file)
    store = store_of(tmp_path, form)
    with store.adopting(CaptureRow(0, torch.arange(T), torch.ones(T)), file) as seen:
        pass
    assert torch.equal(seen, store.read(0)[1])
    assert [path.name for path in tmp_path.iterdir()] == ["hs_0.safetensors"]
    assert store.done({0: T}) == {0}


def test_an_fp8_servers_scales_are_not_lost(tmp_path: Path) -> None:
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    file, store = tmp_path / "cmpl-1.safetensors", store_of(tmp_path, StoreForm())
    rounded, scales = quantize_tensor_to_fp8(states_of(T))
    tensors = {"hidden_states": rounded, "token_ids": torch.arange(T)}
    save_file({**tensors, "hidden_states_scales": scales}, file)
    row = CaptureRow(0, torch.arange(T), torch.ones(T))
    with store.adopting(row, file):
        pass
    assert torch.equal(store.read(0)[1], dequantize_fp8_tensor(rounded, scales))
    store.path(0).unlink()
    save_file(tensors, file)
    with pytest.raises(Damaged, match="without scales"):
        store.adopting(row, file).__enter__()


# --------------------------------------------------------------------------------------------------------
# What it takes


@pytest.mark.parametrize(
    ("dtype", "needed", "formula"),
    [
        ("bfloat16", 57_352, "(4 states x H 7168 x 2 B + 8 B of token id)"),
        ("fp8", 28_696, "(4 states x (H 7168 x 1 B + 4 B of scale) + 8 B of token id)"),
        ("mixed", 35_860, "(3 states x (H 7168 x 1 B + 4 B of scale) + H 7168 x 2 B + 8 B of token id)"),
    ],
)
def test_the_need_for_kimi(tmp_path: Path, dtype: str, needed: int, formula: str) -> None:
    store = HiddenStateStore(tmp_path, 7168, form=StoreForm(dtype))
    assert (store.bytes_per_token, store.formula) == (needed, formula)
    packed = HiddenStateStore(tmp_path, 7168, form=StoreForm(dtype, "zstd"))
    assert (packed.bytes_per_token, packed.formula) == (needed, f"at most {formula} before zstd")


@every_form
def test_files_take_no_more_than_was_said(tmp_path: Path, form: StoreForm) -> None:
    store = store_of(tmp_path, form)
    lengths = {0: 1, 1: 7, 2: T}
    for row, length in lengths.items():
        store.write(row, torch.arange(length), states_of(length))
    taken = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert taken <= store.bytes_of(lengths)
    if form.compress == "none":
        assert taken > store.bytes_of(lengths) - 3 * 400


def test_normal_values_take_two_fifths_of_bfloat16_after_compression(tmp_path: Path) -> None:
    written(tmp_path, StoreForm("fp8", "zstd"), 2000)
    size = (tmp_path / "hs_0.safetensors").stat().st_size
    assert 0.36 < size / StoreForm().bytes_per_token(4, H) / 2000 < 0.43


# --------------------------------------------------------------------------------------------------------
# Who can read it


def rows_of(folder: Path) -> Path:
    row = {"input_ids": list(range(T)), "loss_mask": [1] * T, "seq_len": T, "id": "a#0", "source": "test"}
    dataset.write(folder, [row])  # type: ignore[list-item]
    return folder


def sample(folder: Path, transfer: FileTransfer) -> dict[str, torch.Tensor]:
    from speculators.train.data import ArrowDataset

    return ArrowDataset(512, rows_of(folder), transfer, on_missing="raise")[0]


@pytest.mark.parametrize(("dtype", "reader"), [("bfloat16", FileTransfer), ("fp8", FP8Transfer)])
def test_speculators_own_data_set_reads_plain_files_as_we_do(
    tmp_path: Path, dtype: str, reader: type[FileTransfer]
) -> None:
    store = written(tmp_path / "states", StoreForm(dtype))
    theirs = sample(tmp_path / "rows", reader(store.folder))
    ours = sample(tmp_path / "rows", StoreTransfer(store))
    for name in ("hidden_states", "verifier_last_hidden_states", "input_ids"):
        assert torch.equal(theirs[name], ours[name])
    assert ours["hidden_states"].shape == (T, 3 * H)
    assert torch.equal(store.read(0)[1][:, -1].float(), ours["verifier_last_hidden_states"].float())


@pytest.mark.parametrize("form", [f for f in FORMS if str(f) not in ("bfloat16", "fp8")], ids=str)
@pytest.mark.parametrize("reader", [FileTransfer, FP8Transfer])
def test_a_reader_that_does_not_know_our_forms_fails_by_name(
    tmp_path: Path, form: StoreForm, reader: type[FileTransfer]
) -> None:
    store = written(tmp_path / "states", form)
    with pytest.raises(KeyError, match="hidden_states"):
        sample(tmp_path / "rows", reader(store.folder))
    assert sample(tmp_path / "rows", StoreTransfer(store))["hidden_states"].shape == (T, 3 * H)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_files_of_another_form_neither_count_nor_are_read(tmp_path: Path, form: StoreForm) -> None:
    written(tmp_path, form)
    for other in FORMS:
        store = store_of(tmp_path, other)
        assert store.done({0: T}) == ({0} if other == form else set())
        if other != form:
            with pytest.raises(Damaged) as caught:
                StoreTransfer(store).get_cached(0)
            assert f"it holds {form}, expected {other}" in str(caught.value)


@every_form
def test_files_of_another_shape_do_not_count(tmp_path: Path, form: StoreForm) -> None:
    written(tmp_path, form)
    assert store_of(tmp_path, form).done({0: T + 1}) == set()
    assert HiddenStateStore(tmp_path, H // 2, form=form).done({0: T}) == set()
    assert HiddenStateStore(tmp_path, H, num_aux=2, form=form).done({0: T}) == set()


def test_a_flipped_bit_in_a_compressed_file_is_noticed(tmp_path: Path) -> None:
    store = written(tmp_path, StoreForm("fp8", "zstd"))
    tensors = load_file(store.path(0))
    metadata = {"form": "fp8+zstd", "shape": f"[{T}, 4, {H}]"}
    tensors["hidden_states.zst"][20_000] ^= 1
    save_file(tensors, store.path(0), metadata)
    with pytest.raises(Damaged, match="cannot be decompressed") as caught:
        store.read(0)
    assert caught.value.reason == "unreadable"


def test_a_manifest_without_a_form_means_speculators_own() -> None:
    assert StoreForm.of({"layer_ids": [2, 15, 27]}) == StoreForm("bfloat16", "none")
    assert StoreForm.of(StoreForm("mixed", "zstd").facts()) == StoreForm("mixed", "zstd")
