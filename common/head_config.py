"""A third-party head's config.json, checked against its tensors: geometry, rope, norms, layer ids."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from common.checkpoint import Checkpoint, StoredTensor
from common.errors import InputError
from common.verifier import Verifier

_LAYER = "layers.0."
_NOT_LLAMA = ("medusa", "dflash", "mtp", "mlp_speculator")


@dataclass(frozen=True)
class HeadConfig:
    """A head's architecture, settled.

    Attributes:
        transformer: the drafter's layer; a `kimi_k2` head is a Llama layer and is called so.
        norm_before_residual: False for `midlayer` heads, else what the config says, else False.
        norm_before_fc: one norm over the three states (by the tensor `input_norm`).
        fc_norm: a norm for each state (by the tensors `fc_norm.*`).
        norm_output: the normed output feeds the next step (only the config can tell).
        layer_ids: the aux ids in vLLM's numbering.
        notes: what was decided and by what, for the user.
    """

    transformer: LlamaConfig | Qwen3Config
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layer_ids: list[int]
    notes: tuple[str, ...]


def read_head_config(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    verifier: Verifier,
    args: argparse.Namespace,
    *,
    is_midlayer: bool,
) -> HeadConfig:
    """Settle the architecture: by the tensors, else by the config, else by flags; never by a guess.

    Args:
        checkpoint: gives config.json.
        tensors: by our names.
        verifier: whose hidden size the head must have.
        args: from `head_flags.add_layer_arguments`, for a head whose config.json is missing or incomplete.
        is_midlayer: the layout is `midlayer.*`.

    Raises:
        InputError: something is missing, or config and tensors contradict each other.
    """
    notes: list[str] = []
    raw = flatten(checkpoint.config)
    _refuse_other_architecture(checkpoint)
    hidden = _hidden_size(checkpoint, tensors, verifier)
    geometry = _geometry(checkpoint, tensors, raw, args, notes)
    rope = _rope(checkpoint, raw, args, notes)
    eps = _need(checkpoint, "rms_norm_eps", raw.get("rms_norm_eps"), args.rms_norm_eps, notes)
    positions = _need(
        checkpoint,
        "max_position_embeddings",
        raw.get("max_position_embeddings"),
        args.max_position_embeddings,
        notes,
    )
    if "hidden_act" not in raw:
        notes.append("hidden_act silu: config.json does not say, and every public head has it")
    is_qwen3 = f"{_LAYER}self_attn.q_norm.weight" in tensors
    if not is_qwen3 and raw.get("model_type", "llama") != "llama":
        notes.append(f"model_type {raw['model_type']!r} rewritten to 'llama': the layer is plain attention")
    layer: dict[str, Any] = {
        "vocab_size": verifier.vocab_size,
        "hidden_size": hidden,
        "rms_norm_eps": eps,
        "rope_parameters": rope,
        "max_position_embeddings": positions,
        "hidden_act": raw.get("hidden_act", "silu"),
        "attention_bias": f"{_LAYER}self_attn.q_proj.bias" in tensors,
        "tie_word_embeddings": False,
        **geometry,
    }
    if not is_qwen3:
        layer["mlp_bias"] = f"{_LAYER}mlp.gate_proj.bias" in tensors
    transformer = Qwen3Config(**layer) if is_qwen3 else LlamaConfig(**layer)
    return HeadConfig(
        transformer=transformer,
        norm_before_residual=_norm_before_residual(raw, is_midlayer, notes),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=bool(raw.get("norm_output", False)),
        layer_ids=_layer_ids(checkpoint, raw, args, verifier, notes),
        notes=tuple(notes),
    )


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Lift speculators' `transformer_layer_config` and the nested `eagle_config`; the top level wins."""
    lifted = {**(config.get("eagle_config") or {}), **(config.get("transformer_layer_config") or {})}
    top = {key: value for key, value in config.items() if value is not None}
    model_type = lifted.get("model_type") if "transformer_layer_config" in config else top.get("model_type")
    flat = {**lifted, **top}
    if model_type:
        flat["model_type"] = model_type
    return flat


def _refuse_other_architecture(checkpoint: Checkpoint) -> None:
    names = [
        *(checkpoint.config.get("architectures") or []),
        checkpoint.config.get("speculators_model_type") or "",
    ]
    for name in names:
        if any(word in name.lower() for word in _NOT_LLAMA):
            raise InputError(
                f"{checkpoint.origin}: config.json says {name!r}, which is not an EAGLE-3 head. Start from "
                "an EAGLE-3 head, or train from scratch without --finetune-from."
            )
    if checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config"):
        raise InputError(
            f"{checkpoint.origin}: config.json describes a quantised head. Pass the bfloat16 checkpoint "
            "that it was made from."
        )
    if (checkpoint.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise InputError(
            f"{checkpoint.origin}: eagle_config.use_aux_hidden_state is false: an EAGLE-1/2 head that reads "
            "one hidden state. Start from an EAGLE-3 head, or train from scratch without --finetune-from."
        )


def _hidden_size(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], verifier: Verifier) -> int:
    rows, columns = tensors["fc.weight"].shape
    if columns == 2 * rows:
        raise InputError(
            f"{checkpoint.origin}: fc.weight is [{rows}, {columns}] = [H, 2H]: an EAGLE-1/2 head. EAGLE-3 "
            "reads three hidden states, [H, 3H]. Train from scratch without --finetune-from."
        )
    if rows != verifier.hidden_size or columns != 3 * verifier.hidden_size:
        raise InputError(
            f"{checkpoint.origin}: fc.weight is [{rows}, {columns}], {verifier.name} with hidden size "
            f"{verifier.hidden_size} needs [{verifier.hidden_size}, {3 * verifier.hidden_size}]: this head "
            "belongs to another verifier, or reads another number of states. Pass a head of this "
            "verifier's family."
        )
    return rows


def _geometry(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    raw: dict[str, Any],
    args: argparse.Namespace,
    notes: list[str],
) -> dict[str, int]:
    """Heads, widths and layers: the tensors give the products, the config or a flag one factor."""
    q_rows = tensors[f"{_LAYER}self_attn.q_proj.weight"].shape[0]
    k_rows = tensors[f"{_LAYER}self_attn.k_proj.weight"].shape[0]
    heads = raw.get("num_attention_heads", args.num_heads)
    head_dim = raw.get("head_dim", args.head_dim)
    if heads is None and head_dim is None:
        raise InputError(
            f"{checkpoint.origin}: no config.json says how the {q_rows} rows of q_proj divide into heads. "
            "Pass --num-heads or --head-dim (and see --help for rope and epsilon)."
        )
    # Each factor alone settles the other; where the config names both and they contradict, one may still fit.
    candidates = (
        {(q_rows // head_dim, head_dim)}
        if head_dim and q_rows % head_dim == k_rows % head_dim == 0
        else set()
    )
    if heads and q_rows % heads == 0 and k_rows % (q_rows // heads) == 0:
        candidates.add((heads, q_rows // heads))
    if len(candidates) != 1:
        raise InputError(
            f"{checkpoint.origin}: q_proj has {q_rows} rows and k_proj {k_rows}, which the config's {heads} "
            f"heads of {head_dim} do not make. Correct num_attention_heads and head_dim in config.json."
        )
    heads, head_dim = candidates.pop()
    for name, flag in (
        ("--num-kv-heads", args.num_kv_heads),
        ("--intermediate-size", args.intermediate_size),
    ):
        if flag is not None:
            notes.append(f"{name} {flag} is not used: the tensors decide")
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": k_rows // head_dim,
        "head_dim": head_dim,
        "intermediate_size": tensors[f"{_LAYER}mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": _layers(raw, tensors, notes),
    }
    for name, value in found.items():
        if raw.get(name, value) != value:
            notes.append(f"{name} {value} by the tensors; config.json says {raw[name]}")
    return found


def _layers(raw: dict[str, Any], tensors: Mapping[str, StoredTensor], notes: list[str]) -> int:
    """The config's count where it asks for more layers than there are (`--init-missing` starts them)."""
    stored = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    said = raw.get("num_hidden_layers", stored)
    if said > stored:
        notes.append(f"config.json asks for {said} layers, the tensors have {stored}")
    return max(stored, said)


def _rope(
    checkpoint: Checkpoint, raw: dict[str, Any], args: argparse.Namespace, notes: list[str]
) -> dict[str, Any]:
    """Both spellings -> transformers 5's `rope_parameters`; nothing in the weights shows a wrong one."""
    new = dict(raw.get("rope_parameters") or {})
    old = dict(raw.get("rope_scaling") or {})
    thetas = {
        "rope_parameters": new.get("rope_theta"),
        "rope_scaling": old.pop("rope_theta", None),
        "rope_theta": raw.get("rope_theta"),
    }
    said = {name: float(value) for name, value in thetas.items() if value is not None}
    if len(set(said.values())) > 1:
        raise InputError(
            f"{checkpoint.origin}: config.json gives several rope bases ({said}). Nothing in the tensors "
            "shows which one the head was trained with; keep the right one in config.json."
        )
    theta = next(iter(said.values()), None)
    theta = _need(checkpoint, "rope_theta", theta, args.rope_theta, notes)
    for block in (new, old):
        if "type" in block:
            block.setdefault("rope_type", block.pop("type"))
    differing = [key for key in new.keys() & old.keys() if new[key] != old[key]]
    if differing:
        key = min(differing)
        raise InputError(
            f"{checkpoint.origin}: config.json has {key} {new[key]!r} in rope_parameters and {old[key]!r} in "
            "rope_scaling. Nothing in the tensors shows which one the head was trained with; keep that one."
        )
    settled = {"rope_type": "default", **old, **new, "rope_theta": theta}
    notes.append(f"rope of the checkpoint: {settled}")
    return settled


def _need(checkpoint: Checkpoint, name: str, said: Any, flag: Any, notes: list[str]) -> Any:
    """The config's value, else the flag's; never a guess."""
    if said is not None:
        if flag is not None and flag != said:
            notes.append(f"--{name.replace('_', '-')} {flag} is not used: the checkpoint says {said}")
        return said
    if flag is not None:
        notes.append(f"{name} {flag} by flag")
        return flag
    raise InputError(
        f"{checkpoint.origin}: config.json does not give {name} and no tensor shows it. A guess would cost "
        f"acceptance without an error. Pass --{name.replace('_', '-')}."
    )


def _norm_before_residual(raw: dict[str, Any], is_midlayer: bool, notes: list[str]) -> bool:
    said = raw.get("norm_before_residual")
    if is_midlayer:
        if said:
            notes.append(
                "norm_before_residual false: config.json says true, but midlayer heads are built without"
            )
        return False
    if said is None:
        # speculators' own loader defaults to True, its config class to False; its checkpoints always say.
        notes.append("norm_before_residual false: config.json does not say, and vLLM would serve it so")
    return bool(said)


def _layer_ids(
    checkpoint: Checkpoint,
    raw: dict[str, Any],
    args: argparse.Namespace,
    verifier: Verifier,
    notes: list[str],
) -> list[int]:
    """vLLM's numbering: id L is the output after L layers. Third-party ids from 0 or 1 on count from 0."""
    if args.head_layer_ids:
        notes.append(f"layer ids {args.head_layer_ids} by flag")
        return list(args.head_layer_ids)
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or raw.get("aux_hidden_state_layer_ids")
    if not ids:
        ids = verifier.default_layer_ids
        notes.append(f"layer ids {ids}: none in the checkpoint, so vLLM's default, as it would be served")
        return ids
    nested = (checkpoint.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    # speculators' own checkpoints, and exports that name both numberings side by side, leave no doubt.
    is_vllms = "speculators_model_type" in checkpoint.config or nested == [layer_id - 1 for layer_id in ids]
    if ids[0] <= 1 and not is_vllms:
        shifted = [layer_id + 1 for layer_id in ids]
        notes.append(f"layer ids {ids} count layer outputs from 0: {shifted} in vLLM's numbering")
        return shifted
    notes.append(f"layer ids {ids} as the checkpoint has them (vLLM's numbering)")
    return list(ids)
