"""A third-party checkpoint, opened: every file format, only the head's files, nothing unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import InputError

D2T = [2, 2, 3]


def tensors() -> dict[str, torch.Tensor]:
    return {
        "fc.weight": torch.arange(12, dtype=torch.bfloat16).reshape(2, 6),
        "norm.weight": torch.ones(2),
        "d2t": torch.tensor(D2T),
        "t2d": torch.tensor([False, False, True, True, False, True]),
    }


def assert_is_the_head(found: Checkpoint) -> None:
    assert {key: (stored.shape, stored.dtype) for key, stored in found.tensors.items()} == {
        "fc.weight": ((2, 6), torch.bfloat16),
        "norm.weight": ((2,), torch.float32),
        "d2t": ((3,), torch.int64),
        "t2d": ((6,), torch.bool),
    }
    assert found.tensors["d2t"].read().tolist() == D2T
    assert found.tensors["fc.weight"].read()[1].tolist() == [6, 7, 8, 9, 10, 11]


def write_shards(
    folder: Path, index: str = "model.safetensors.index.json", suffix: str = "safetensors"
) -> None:
    """Two shards of two tensors each, and their index."""
    weight_map = {}
    for number, keys in enumerate((("fc.weight", "d2t"), ("norm.weight", "t2d")), start=1):
        name = f"model-{number:05}-of-00002.{suffix}"
        shard = {key: tensors()[key] for key in keys}
        (save_file if suffix == "safetensors" else torch.save)(shard, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ----------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "eagle3.pth"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_folder_or_one_file_in_any_format_is_the_same_head(tmp_path: Path, name: str, as_file) -> None:
    (save_file if name.endswith("safetensors") else torch.save)(tensors(), tmp_path / name)
    (tmp_path / "config.json").write_text('{"hidden_size": 2}')
    found = open_checkpoint(str(tmp_path / name if as_file else tmp_path))
    assert_is_the_head(found)
    assert found.config == {"hidden_size": 2}
    assert found.ignored == ()


def test_a_file_without_a_config_has_an_empty_one(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path / "model.safetensors")).config == {}


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_is_the_head(open_checkpoint(str(tmp_path)))


def test_shards_of_bin_files_are_joined_by_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path, "pytorch_model.bin.index.json", "bin")
    assert_is_the_head(open_checkpoint(str(tmp_path)))


def test_shards_without_an_index_are_joined(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_is_the_head(open_checkpoint(str(tmp_path)))


def test_a_bin_file_of_torch_before_1_6_is_read(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_is_the_head(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
def test_a_trainer_s_dictionary_around_the_tensors_is_taken_off(tmp_path: Path, wrapper: str) -> None:
    torch.save({wrapper: tensors(), "epoch": 3, "args": {"lr": 1e-4}}, tmp_path / "model.pt")
    assert_is_the_head(open_checkpoint(str(tmp_path)))


def test_a_map_saved_as_a_list_is_a_tensor(tmp_path: Path) -> None:
    torch.save(tensors() | {"d2t": D2T}, tmp_path / "model.pt")
    assert_is_the_head(open_checkpoint(str(tmp_path)))


def test_small_float_types_keep_their_name_so_that_they_can_be_refused_by_it(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    save_file({"scale": torch.zeros(2, dtype=torch.uint16)}, tmp_path / "b.safetensors")
    found = open_checkpoint(str(tmp_path)).tensors
    assert (found["fc.weight"].dtype, found["scale"].dtype) == (torch.float8_e4m3fn, torch.uint16)


def test_a_head_opens_without_reading_its_tensors(midlayer_head: Path) -> None:
    found = open_checkpoint(str(midlayer_head))
    assert found.tensors["midlayer.self_attn.q_proj.weight"].shape == (576, 1152)
    assert found.tensors["lm_head.weight"].shape == (4096, 576)
    assert found.config["architectures"] == ["LlamaForCausalLMEagle3"]


# ----------------------------------------------------------------------------------------------------------
# Which files


@pytest.mark.parametrize("sharded", [False, True])
def test_the_trainer_s_own_files_are_left_alone_and_listed(tmp_path: Path, sharded: bool) -> None:
    write_shards(tmp_path) if sharded else save_file(tensors(), tmp_path / "model.safetensors")
    trainer = ["optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin", "training_state.pt"]
    for name in trainer:
        (tmp_path / name).write_bytes(pickle.dumps({"anything": Path}))
    found = open_checkpoint(str(tmp_path))
    assert_is_the_head(found)
    assert list(found.ignored) == trainer


def test_safetensors_win_over_a_second_format_beside_them(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    found = open_checkpoint(str(tmp_path))
    assert_is_the_head(found)
    assert found.ignored == ("pytorch_model.bin",)


def test_weights_outside_of_the_index_are_left_alone_and_listed(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    found = open_checkpoint(str(tmp_path))
    assert_is_the_head(found)
    assert found.ignored == ("consolidated.safetensors",)


def test_a_folder_of_only_trainer_files_has_no_weights(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "training_state.pt")
    with pytest.raises(InputError, match=r"no weights .* in the folder; found training_state.pt"):
        open_checkpoint(str(tmp_path))


def test_an_empty_folder_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found nothing"):
        open_checkpoint(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------
# Refused


class Payload:
    """What a hostile file holds: unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_object_is_refused_and_never_run(tmp_path: Path, zipped: bool) -> None:
    target = tmp_path / "it-ran"
    hostile = tensors() | {"extra": Payload(target)}
    torch.save(hostile, tmp_path / "model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"model.bin is damaged or holds more than tensors, and nothing is"):
        open_checkpoint(str(tmp_path))
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 torn", b"\x80\x02}q\x00."])
@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_cut_off_by_a_download_is_named(tmp_path: Path, name: str, share: float) -> None:
    (save_file if name.endswith("safetensors") else torch.save)(tensors(), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match=name):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(1)], "expected a dictionary of tensors, found list"),
        ({"fc.weight": torch.zeros(1), "epoch": 3}, "'epoch' is a int, expected a tensor"),
        ({"fc.weight": ["a"]}, "'fc.weight' is a list, expected a tensor"),
        ({0: torch.zeros(1)}, "0 is a Tensor, expected a tensor"),
    ],
)
def test_a_torch_file_of_something_else_is_refused(tmp_path: Path, value, message: str) -> None:
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(InputError, match=f"model.pt: {message}"):
        open_checkpoint(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"index.json names the shard model-00002-of-00002.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": []}', "{"])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"model.safetensors.index.json"):
        open_checkpoint(str(tmp_path))


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    save_file({"d2t": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"b.safetensors: tensor 'd2t' is in another file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[]", "expected an object")])
def test_a_damaged_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=f"config.json.* {message}"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/no-such-head", "/no/such/folder", "no such/thing at/all", "./typo"])
def test_what_is_neither_here_nor_on_the_hub_names_the_flag(name: str) -> None:
    with pytest.raises(InputError, match=f"--finetune-from {name}( is neither a file|: no such file)"):
        open_checkpoint(name)
    with pytest.raises(InputError, match=f"--compare-to {name}( is neither|: no such file)"):
        open_checkpoint(name, flag="--compare-to")
