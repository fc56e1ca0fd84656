"""A third-party checkpoint, opened but not read: names and shapes first, single tensors later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from common import atomic_io, log
from common.errors import InputError

_LOG = log.get("checkpoint")
_WEIGHTS = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
)
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
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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


def open_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """Open a folder, one weight file, or a hub repository.

    Args:
        name: path or hub id.
        revision: hub branch, tag or commit.

    Raises:
        InputError: nothing is there, there are no weights, or a file is damaged or would need unpickling.
    """
    path = Path(name)
    if path.is_file():
        return _read([path], path.parent, name, ())
    folder = path if path.is_dir() else _download(name, revision)
    files, ignored = _weight_files(folder)
    for file in ignored:
        _LOG.info("%s: %s is no weight file of the head and is ignored", name, file)
    if not files:
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise InputError(f"{name}: no weights (*.safetensors, *.bin, *.pt) in the folder; found {found}")
    return _read(files, folder, name, ignored)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.bin", "*.pt"]
    ignored = [f"*{stem}*" for stem in _IGNORED]
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored)
        )
    except (OSError, HFValidationError, ValueError) as error:
        raise InputError(
            f"--finetune-from {name} is neither a file, a folder, nor a hub repository within reach: {error}"
        ) from None


def _weight_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The weight files of a folder (the shards of an index, where there is one), and what was left alone."""
    ignored: list[str] = []
    for pattern in _WEIGHTS:
        hits = sorted(folder.glob(pattern))
        ignored += [p.name for p in hits if p.name.startswith(_IGNORED)]
        hits = [p for p in hits if not p.name.startswith(_IGNORED)]
        if hits and pattern.endswith("index.json"):
            shards = sorted(set(atomic_io.read_json(hits[0])["weight_map"].values()))
            missing = [shard for shard in shards if not (folder / shard).exists()]
            if missing:
                raise InputError(
                    f"{hits[0]} names the shard {missing[0]}, which is not there: download it again"
                )
            return [folder / shard for shard in shards], tuple(ignored)
        if hits:
            # A second format beside the first would be the same head once more.
            ignored += [
                p.name for other in ("*.bin", "*.pt") for p in sorted(folder.glob(other)) if p not in hits
            ]
            return hits, tuple(dict.fromkeys(ignored))
    return [], tuple(ignored)


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
    except Exception as error:
        raise InputError(f"{file} is no readable safetensors file: {error}. Download it again.") from None


def _torch_file(file: Path) -> dict[str, StoredTensor]:
    import pickle

    try:
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"{file} is damaged or holds more than tensors, and nothing is unpickled here: "
            f"{str(error).splitlines()[0]} Convert it to safetensors where you trust it."
        ) from None
    # Trainers save either the tensors themselves or one dictionary around them.
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise InputError(f"{file}: expected a dictionary of tensors, found {type(loaded).__name__}")
    as_tensors = {
        key: torch.as_tensor(value) for key, value in loaded.items() if isinstance(value, list | torch.Tensor)
    }
    others = loaded.keys() - as_tensors.keys()
    if others:
        raise InputError(
            f"{file}: {min(others)!r} is a {type(loaded[min(others)]).__name__}, expected a tensor"
        )
    return {key: StoredTensor.of(tensor) for key, tensor in as_tensors.items()}
