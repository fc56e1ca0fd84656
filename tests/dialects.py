"""One SpecForge head, rewritten as every family saves it; independent of the code that reads them.

Each writer takes the head's tensors and config as SpecForge saved them and writes a checkpoint to a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
V = 49152


def read_source(folder: Path) -> tuple[Tensors, Config]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def untrained(folder: Path) -> None:
    """A head for SmolLM2 as SpecForge saves one, with random weights: right in all but what it predicts."""
    random = torch.Generator().manual_seed(0)
    hidden, inner, heads, kv_heads, head_dim, rows = 576, 1536, 9, 3, 64, 4096

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / shape[-1] ** 0.5

    tokens = torch.randperm(V, generator=random)[:rows].sort().values
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors = {
        "fc.weight": normal(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": normal(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": normal(inner, hidden),
        "midlayer.mlp.up_proj.weight": normal(inner, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, inner),
        "lm_head.weight": normal(rows, hidden),
        **{f"{name}.weight": 0.5 + torch.rand(hidden, generator=random) for name in norms},
    }
    maps = {
        "d2t": tokens - torch.arange(rows),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": V,
        "draft_vocab_size": rows,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    save(folder, {name: tensor.bfloat16() for name, tensor in tensors.items()} | maps, config)


def tokens_of(tensors: Tensors) -> torch.Tensor:
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def save(folder: Path, tensors: Tensors, config: Config | None) -> None:
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def reorder(tensors: Tensors, order: torch.Tensor) -> Tensors:
    """The same head with its rows (and the offsets that go with them) in another order."""
    tokens = tokens_of(tensors)[order]
    d2t = tokens - torch.arange(len(tokens))
    return tensors | {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": d2t}


def rename(tensors: Tensors, layer: str, body: str = "", heads: str = "") -> Tensors:
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("midlayer."):
            renamed[f"{layer}.{name.removeprefix('midlayer.')}"] = tensor
        elif name in ("lm_head.weight", "d2t", "t2d"):
            renamed[heads + name] = tensor
        else:
            renamed[body + name] = tensor
    return renamed


def by_frequency(tensors: Tensors) -> torch.Tensor:
    return torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))


def specforge(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    save(folder, tensors, config)


def safeailab_bin(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"step": 7, "optimizer": {"lr": 1e-3}}, folder / "training_state.pt")
    (folder / "config.json").write_text(json.dumps(config))


def data_parallel(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    save(folder, {f"module.{name}": tensor for name, tensor in tensors.items()}, config)


def sharded(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    folder.mkdir(parents=True)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def speculators(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size", "rope_theta")}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    saved = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "transformer_layer_config": layer,
    }
    save(folder, rename(tensors, "layers.0") | {"embed_tokens.weight": embedding}, saved)


def modelopt(
    folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor, prefix: str = ""
) -> None:
    """Rows by frequency, offsets without t2d, ids counted from 0 in a nested block, rope_parameters."""
    shuffled = reorder(tensors, by_frequency(tensors))
    del shuffled["t2d"]
    theta = config["rope_theta"]
    saved = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    saved["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True}
    save(folder, rename(shuffled, f"{prefix}layers.0", prefix, prefix), saved)


def modelopt_unexported(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    modelopt(folder, tensors, config, embedding, "eagle_module.")


def modelopt_draft_model(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    modelopt(folder, tensors, config, embedding, "draft_model.")


def automodel(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    """Special tokens first, everything but the head below `model.`, the embedding present."""
    tokens = tokens_of(tensors)
    special = tokens >= 49000
    order = torch.cat([torch.nonzero(special).flatten(), torch.nonzero(~special).flatten()])
    moved = reorder(tensors, order) | {"embed_tokens.weight": embedding}
    save(folder, rename(moved, "model.layers.0", "model."), config)


def absolute(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    save(folder, tensors | {"d2t": tokens_of(tensors)}, config)


def absolute_without_t2d(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    without = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    save(
        folder, without | {"d2t": tokens_of(tensors)[by_frequency(tensors)]} | _shuffled_head(tensors), config
    )


def _shuffled_head(tensors: Tensors) -> Tensors:
    return {"lm_head.weight": tensors["lm_head.weight"][by_frequency(tensors)]}


def list_map(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    folder.mkdir(parents=True)
    torch.save(tensors | {"d2t": tensors["d2t"].tolist()}, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps(config))


def t2d_only(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    save(folder, {name: tensor for name, tensor in tensors.items() if name != "d2t"}, config)


def padded_rows(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    head = tensors["lm_head.weight"]
    save(folder, tensors | {"lm_head.weight": torch.cat([head, head.new_zeros(64, head.shape[1])])}, config)


def _full_head(tensors: Tensors) -> torch.Tensor:
    head = tensors["lm_head.weight"]
    full = torch.zeros(V, head.shape[1], dtype=head.dtype)
    full[tokens_of(tensors)] = head
    return full


def full_vocabulary(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    full = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")} | {
        "lm_head.weight": _full_head(tensors)
    }
    save(folder, full, config | {"draft_vocab_size": V})


def full_vocabulary_zero_map(folder: Path, tensors: Tensors, config: Config, embedding: torch.Tensor) -> None:
    maps = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    save(folder, tensors | maps | {"lm_head.weight": _full_head(tensors)}, config | {"draft_vocab_size": V})


Writer = Callable[[Path, Tensors, Config, torch.Tensor], None]
# Writer -> the layout that the import must name.
DIALECTS: dict[Writer, str] = {
    specforge: "specforge",
    safeailab_bin: "specforge",
    data_parallel: "specforge",
    sharded: "specforge",
    speculators: "speculators",
    modelopt: "speculators",
    modelopt_unexported: "modelopt",
    modelopt_draft_model: "modelopt",
    automodel: "automodel",
    absolute: "specforge",
    absolute_without_t2d: "specforge",
    list_map: "specforge",
    t2d_only: "specforge",
    padded_rows: "specforge",
    full_vocabulary: "specforge",
    full_vocabulary_zero_map: "specforge",
}
