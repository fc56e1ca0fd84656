"""A third-party checkpoint, opened but not read: names and shapes first, single tensors later."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common import atomic_io, hub, log
from common.errors import InputError

_LOG = log.get("checkpoint")
# The first kind that a folder has counts; a second would be the same head once more.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# Written beside a head by its trainer; never weights.
_IGNORED = ("training_state", "optimizer", "scheduler", "rng_state", "trainer_state", "training_args")
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        shape: as stored.
        dtype: as stored.
        read: loads it, and nothing else of the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        """A tensor that is in memory already (or on the meta device, for plans)."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's tensors and its config.json.

    Attributes:
        origin: folder, file or hub id, for messages.
        tensors: name -> stored tensor.
        config: config.json as it is; empty when there is none.
        ignored: files beside the weights that were left alone.
    """

    origin: str
    tensors: dict[str, StoredTensor]
    config: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def open_checkpoint(name: str, revision: str | None = None, *, flag: str = "--finetune-from") -> Checkpoint:
    """Open a folder, one weight file, or a hub repository.

    Args:
        name: path or hub id.
        revision: hub branch, tag or commit.
        flag: where the user gave `name`, for the error.

    Raises:
        InputError: nothing is there, there are no weights, or a file is damaged or would need unpickling.
    """
    path = Path(name)
    if path.is_file():
        return _read([path], path.parent, name, ())
    patterns = ["*.json", *(f"*{suffix}" for suffix in _SUFFIXES)]
    ignored_names = [f"*{stem}*" for stem in _IGNORED]
    folder = hub.folder(name, revision, flag=flag, patterns=patterns, ignored=ignored_names)
    files, ignored = _weight_files(folder)
    for file in ignored:
        _LOG.info("%s: %s is no weight file of the head and is ignored", name, file)
    if not files:
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise InputError(
            f"{flag} {name}: no weights (*.safetensors, *.bin, *.pt) in the folder; found {found}. Pass the "
            "head's own folder (of a run of ours: RUN/drafter or RUN/specforge)."
        )
    return _read(files, folder, name, ignored)


def _weight_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The weight files of a folder (the shards of an index, where there is one), and what was left alone."""
    every = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    candidates = [path for path in every if not path.name.startswith(_IGNORED)]
    index = next((folder / name for name in _INDEXES if (folder / name).exists()), None)
    if index:
        chosen = _shards(index)
    else:
        kind = next((suffix for suffix in _SUFFIXES if any(p.suffix == suffix for p in candidates)), None)
        chosen = [path for path in candidates if path.suffix == kind]
    return chosen, tuple(path.name for path in every if path not in chosen)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(atomic_io.read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{index} has no weight_map: download it again") from None
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise InputError(f"{index} names the shard {missing[0]}, which is not there: download it again")
    return [index.parent / name for name in names]


def _read(files: list[Path], folder: Path, origin: str, ignored: tuple[str, ...]) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = _safetensors(file) if file.suffix == ".safetensors" else _torch_file(file)
        twice = tensors.keys() & found.keys()
        if twice:
            raise InputError(
                f"{file}: tensor {min(twice)!r} is in another file of {folder} too; keep one of them"
            )
        tensors |= found
    config_path = folder / "config.json"
    config = atomic_io.read_json(config_path) if config_path.exists() else {}
    if not isinstance(config, dict):
        raise InputError(f"{config_path}: expected an object, found {type(config).__name__}")
    return Checkpoint(origin, tensors, config, ignored)


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    def reader(key: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            with safe_open(file, framework="pt") as handle:
                return handle.get_tensor(key)

        return read

    try:
        with safe_open(file, framework="pt") as handle:
            slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 - no mapping
            return {
                key: StoredTensor(tuple(s.get_shape()), _SAFETENSORS_DTYPES[s.get_dtype()], reader(key))
                for key, s in slices.items()
            }
    except SafetensorError as error:
        raise InputError(f"{file} is no readable safetensors file: {error}. Download it again.") from None


def _torch_file(file: Path) -> dict[str, StoredTensor]:
    try:
        # torch before 1.6 wrote no zip file, which alone can be mapped into memory.
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"{file} is damaged or holds more than tensors, and nothing is unpickled here: "
            f"{str(error).partition(chr(10))[0]} Convert it to safetensors where you trust it."
        ) from None
    # Trainers save either the tensors themselves or one dictionary around them.
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise InputError(f"{file}: expected a dictionary of tensors, found {type(loaded).__name__}")
    return {key: StoredTensor.of(_as_tensor(key, value, file)) for key, value in loaded.items()}


def _as_tensor(key: object, value: object, file: Path) -> torch.Tensor:
    """A tensor as it is; a list of numbers too, as some trainers save d2t."""
    try:
        if isinstance(key, str) and isinstance(value, list | torch.Tensor):
            return torch.as_tensor(value)
    except (TypeError, ValueError):
        pass
    raise InputError(f"{file}: {key!r} is a {type(value).__name__}, expected a tensor")
