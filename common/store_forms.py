"""How a row's states lie in its file: in which precision, plain or compressed, and what that takes.

Plain bfloat16 and plain fp8 are speculators' own files (its FileTransfer and FP8Transfer read them). The
others are ours alone: they hold no tensor `hidden_states`, so that a reader that does not know them fails by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Layout = dict[str, tuple[str, list[int]]]

TOKEN_IDS = "token_ids"
_STATES, _SCALES = "hidden_states", "hidden_states_scales"  # speculators' names
_AUX, _AUX_SCALES, _LAST = "aux_states", "aux_states_scales", "last_state"
_ZST = ".zst"
_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
_BYTES_PER_TOKEN_ID = 8

# Where the mean of |x| comes to lie after scaling. e4m3 is an even grid of 2^-9 below 2^-5 and grows coarser
# above: the lower the mean, the fewer different bytes and the better they pack; too low, and small values
# vanish. SmolLM2's states after zstd, in parts of bfloat16, and what a head accepted on them (1.346 on
# bfloat16): at 2^-4 0.388 and 1.345, at 2^-5 0.356 and 1.350, at 2^-6 0.309 and 1.340; with hs_connectors'
# scale 0.457 and 1.350.
_MEAN_AT = 2**-4
_FP8_MAX = 448.0
_TOKENS_AT_ONCE = 256  # float32 copies stay small for rows of any length

# Higher levels find nothing more: single bytes are coded by their frequency, repeats there are none.
_ZSTD_LEVEL = 1


class Precision(Protocol):
    """What states are rounded to."""

    def layout(self, shape: list[int]) -> Layout:
        """Name -> (safetensors' dtype, shape) of the tensors that hold states [T, A+1, H]."""
        ...

    def formula(self, states: int, hidden: int) -> str:
        """Bytes of a token's states, for a first screen."""
        ...

    def pack(self, states: torch.Tensor) -> Tensors:
        """[T, A+1, H] floating point -> the tensors of `layout`."""
        ...

    def unpack(self, tensors: Tensors) -> torch.Tensor:
        """The tensors of `layout` -> [T, A+1, H] bfloat16."""
        ...


class Bfloat16:
    """The states as they are."""

    def layout(self, shape: list[int]) -> Layout:
        """As `Precision`."""
        return {_STATES: ("BF16", shape)}

    def formula(self, states: int, hidden: int) -> str:
        """As `Precision`."""
        return f"{states} states x H {hidden} x 2 B"

    def pack(self, states: torch.Tensor) -> Tensors:
        """As `Precision`."""
        return {_STATES: states.bfloat16()}

    def unpack(self, tensors: Tensors) -> torch.Tensor:
        """As `Precision`."""
        return tensors[_STATES]


class Fp8:
    """e4m3 with one float32 scale a token and state, which hs_connectors' FP8Transfer multiplies back."""

    def layout(self, shape: list[int]) -> Layout:
        """As `Precision`."""
        return {_STATES: ("F8_E4M3", shape), _SCALES: ("F32", [*shape[:2], 1])}

    def formula(self, states: int, hidden: int) -> str:
        """As `Precision`."""
        return f"{states} states x (H {hidden} x 1 B + 4 B of scale)"

    def pack(self, states: torch.Tensor) -> Tensors:
        """As `Precision`."""
        return dict(zip((_STATES, _SCALES), to_fp8(states), strict=True))

    def unpack(self, tensors: Tensors) -> torch.Tensor:
        """As `Precision`."""
        return from_fp8(tensors[_STATES], tensors[_SCALES])


class Mixed:
    """The aux states in fp8; the last one, from which the targets are computed, in bfloat16."""

    def layout(self, shape: list[int]) -> Layout:
        """As `Precision`."""
        tokens, states, hidden = shape
        return {
            _AUX: ("F8_E4M3", [tokens, states - 1, hidden]),
            _AUX_SCALES: ("F32", [tokens, states - 1, 1]),
            _LAST: ("BF16", [tokens, 1, hidden]),
        }

    def formula(self, states: int, hidden: int) -> str:
        """As `Precision`."""
        return f"{states - 1} states x (H {hidden} x 1 B + 4 B of scale) + H {hidden} x 2 B"

    def pack(self, states: torch.Tensor) -> Tensors:
        """As `Precision`."""
        aux, scales = to_fp8(states[:, :-1])
        return {_AUX: aux, _AUX_SCALES: scales, _LAST: states[:, -1:].bfloat16().contiguous()}

    def unpack(self, tensors: Tensors) -> torch.Tensor:
        """As `Precision`."""
        import torch

        return torch.cat([from_fp8(tensors[_AUX], tensors[_AUX_SCALES]), tensors[_LAST]], dim=1)


PRECISIONS: dict[str, Precision] = {"bfloat16": Bfloat16(), "fp8": Fp8(), "mixed": Mixed()}
COMPRESSIONS = ("none", "zstd")


@dataclass(frozen=True)
class StoreForm:
    """The form of all files of a store.

    Attributes:
        dtype: a name of `PRECISIONS`.
        compress: one of `COMPRESSIONS`; lossless.
    """

    dtype: str = "bfloat16"
    compress: str = "none"

    def __str__(self) -> str:
        return self.dtype if self.compress == "none" else f"{self.dtype}+{self.compress}"

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> StoreForm:
        """The form that a manifest's facts name; speculators' plain one where they name none."""
        return cls(facts.get("store_dtype", "bfloat16"), facts.get("compress", "none"))

    def facts(self) -> dict[str, str]:
        """For the manifest."""
        return {"store_dtype": self.dtype, "compress": self.compress}

    @property
    def precision(self) -> Precision:
        """What states are rounded to."""
        return PRECISIONS[self.dtype]

    def bytes_per_token(self, states: int, hidden: int) -> int:
        """States and token id; with compression no more than that."""
        layout = self.precision.layout([1, states, hidden]).values()
        return sum(_BYTES[dtype] * prod(shape) for dtype, shape in layout) + _BYTES_PER_TOKEN_ID

    def formula(self, states: int, hidden: int) -> str:
        """How `bytes_per_token` comes about."""
        counted = f"({self.precision.formula(states, hidden)} + {_BYTES_PER_TOKEN_ID} B of token id)"
        return counted if self.compress == "none" else f"at most {counted} before {self.compress}"

    def to_bytes(self, token_ids: torch.Tensor, packed: Tensors, shape: list[int]) -> bytes:
        """A file's content.

        Args:
            token_ids: [T] int64.
            packed: from the precision's `pack`.
            shape: of the states, [T, A+1, H].
        """
        from safetensors.torch import save

        tensors, metadata = {name: tensor.contiguous() for name, tensor in packed.items()}, None
        if self.compress == "zstd":
            metadata = {"form": str(self), "shape": json.dumps(shape)}
            tensors = {name + _ZST: _compressed(tensor) for name, tensor in tensors.items()}
        # Not save_file: it hides the number of the system's error, and with it a full disk.
        return save({**tensors, TOKEN_IDS: token_ids.contiguous()}, metadata)

    def fits(self, path: Path, shape: list[int]) -> bool:
        """Whether a file, by its header alone, has this form and states of that shape [T, A+1, H]."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            if _form_of(file) != self:
                return False
            if file.get_slice(TOKEN_IDS).get_shape() != shape[:1]:
                return False
            if self.compress == "zstd":
                return json.loads(file.metadata()["shape"]) == shape
            found = {name: file.get_slice(name) for name in self.precision.layout(shape)}
            return {name: (part.get_dtype(), part.get_shape()) for name, part in found.items()} == (
                self.precision.layout(shape)
            )


def read(path: Path, form: StoreForm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A file's `token_ids [T]` int64 and its states.

    Args:
        path: the file.
        form: that it must have; None takes any, as a server may write it.

    Returns:
        The ids, and [T, A+1, H] bfloat16 (with None, of any floating point).

    Raises:
        ValueError: the file has another form, or is damaged.
        SafetensorError: it is no whole safetensors file.
    """
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = _form_of(file)
        if found is None or (form is not None and found != form):
            raise ValueError(f"it holds {found or sorted(file.keys())}, expected {form or 'states'}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    token_ids = tensors.pop(TOKEN_IDS)
    if found.compress == "zstd":
        layout = found.precision.layout(json.loads(metadata["shape"]))
        tensors = {name: _decompressed(tensors[name + _ZST], *layout[name]) for name in layout}
    states = found.precision.unpack(tensors)
    if states.dtype == torch.float8_e4m3fn:
        raise ValueError("its fp8 states come without scales")
    return token_ids, states


def _form_of(file: Any) -> StoreForm | None:
    """The form of an open safetensors file by its tensors' names; None where it holds no states."""
    names = set(file.keys())
    for dtype, precision in PRECISIONS.items():
        parts = precision.layout([1, 2, 1])
        if names == {*parts, TOKEN_IDS}:
            return StoreForm(dtype)
        if names == {*(name + _ZST for name in parts), TOKEN_IDS}:
            return StoreForm(dtype, "zstd")
    return None


def to_fp8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to e4m3 with a scale that depends on the mean, not on the largest value.

    `scale`: the power of two above `max(mean|x| / _MEAN_AT, max|x| / 448)`, for each token and state.
    hs_connectors takes `max|x| / 448` of a token's states together: no more exact, and its bytes carry one
    bit more. With a power of two the product is exact in bfloat16.

    Args:
        states: [T, S, H] floating point.

    Returns:
        [T, S, H] float8_e4m3fn and [T, S, 1] float32.
    """
    import torch

    rounded = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*states.shape[:2], 1)
    for part, into, scale in zip(
        states.split(_TOKENS_AT_ONCE),
        rounded.split(_TOKENS_AT_ONCE),
        scales.split(_TOKENS_AT_ONCE),
        strict=True,
    ):
        values = part.float()
        size = values.abs()
        least = torch.maximum(
            size.mean(-1, keepdim=True) / _MEAN_AT, size.amax(-1, keepdim=True) / _FP8_MAX
        ).clamp(min=torch.finfo(torch.float32).tiny)
        torch.ldexp(torch.ones_like(least), torch.frexp(least).exponent, out=scale)
        into.copy_(values / scale)
    return rounded, scales


def from_fp8(rounded: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What FP8Transfer makes of the same tensors, at four times its speed on a CPU.

    Args:
        rounded: [T, S, H] float8_e4m3fn.
        scales: float32, of a shape that broadcasts.

    Returns:
        [T, S, H] bfloat16.
    """
    import numpy as np
    import torch

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    table = every.view(torch.int16).numpy()
    states = torch.empty(rounded.shape, dtype=torch.bfloat16)
    for part, into in zip(rounded.split(_TOKENS_AT_ONCE), states.split(_TOKENS_AT_ONCE), strict=True):
        np.take(table, part.view(torch.uint8).numpy(), out=into.view(torch.int16).numpy(), mode="clip")
    return states.mul_(scales.bfloat16())


def _compressed(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8: all first bytes of the values, then all second ones: each kind has its own frequencies."""
    import numpy as np
    import torch
    import zstandard

    planes = tensor.flatten()[:, None].view(torch.uint8).numpy().T
    coder = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    return torch.frombuffer(bytearray(coder.compress(np.ascontiguousarray(planes).data)), dtype=torch.uint8)


def _decompressed(packed: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    import numpy as np
    import torch
    import zstandard

    try:
        content = zstandard.ZstdDecompressor().decompress(packed.numpy().data)
        planes = np.frombuffer(content, np.uint8).reshape(_BYTES[dtype], -1)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    values = np.empty((planes.shape[1], len(planes)), np.uint8)
    for number, plane in enumerate(planes):  # six times as fast as a transposed copy
        values[:, number] = plane
    kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    return torch.from_numpy(values.reshape(-1)).view(kinds[dtype]).reshape(shape)
