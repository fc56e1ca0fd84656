"""A head's config.json against its tensors: what decides, what stops."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from common.checkpoint import Checkpoint, StoredTensor
from common.errors import InputError
from common.head_config import HeadConfig, read_head_config
from common.verifier import Verifier

FLAGS = argparse.Namespace(
    num_heads=None,
    num_kv_heads=None,
    head_dim=None,
    intermediate_size=None,
    rope_theta=None,
    rms_norm_eps=None,
    max_position_embeddings=None,
    head_layer_ids=None,
)
# SmolLM2's drafter: H 576, 9 heads and 3 kv heads of 64, I 1536.
SHAPES = {
    "fc.weight": (576, 1728),
    "layers.0.self_attn.q_proj.weight": (576, 1152),
    "layers.0.self_attn.k_proj.weight": (192, 1152),
    "layers.0.mlp.gate_proj.weight": (1536, 576),
}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def read(verifier_dir: Any) -> Any:
    def read(config: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES, **flags: Any) -> HeadConfig:
        tensors = {
            name: StoredTensor.of(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
            for name, shape in shapes.items()
        }
        args = argparse.Namespace(**{**vars(FLAGS), **flags})
        checkpoint = Checkpoint("HEAD", tensors, config)
        return read_head_config(checkpoint, tensors, Verifier(str(verifier_dir)), args, is_midlayer=True)

    return read


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key not in keys}


def test_geometry_comes_from_the_tensors_where_the_config_is_wrong(read: Any) -> None:
    layer = read(CONFIG | {"intermediate_size": 4096, "num_key_value_heads": 9}).transformer
    assert (layer.intermediate_size, layer.num_key_value_heads) == (1536, 3)


def test_head_dim_is_q_rows_over_heads_where_the_config_has_none(read: Any) -> None:
    # Kimi's heads: 8192 rows of q_proj, 64 heads; hidden_size / heads would give 112.
    shapes = SHAPES | {
        "layers.0.self_attn.q_proj.weight": (1152, 1152),
        "layers.0.self_attn.k_proj.weight": (384, 1152),
    }
    assert read(without("head_dim"), shapes).transformer.head_dim == 128


def test_a_wrong_head_dim_yields_to_the_only_reading_that_fits(read: Any) -> None:
    assert read(CONFIG | {"head_dim": 100}).transformer.head_dim == 64


def test_heads_and_head_dim_that_contradict_each_other_stop_the_import(read: Any) -> None:
    with pytest.raises(InputError, match=r"576 rows and k_proj 192, which the config's 3 heads of 64"):
        read(CONFIG | {"num_attention_heads": 3})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0}},
        {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "yarn", "factor": 64.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 64.0, "rope_theta": 50000.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 64.0, "rope_theta": 50000.0}},
    ],
)
def test_every_spelling_of_rope_gives_the_same_block(read: Any, spelling: dict[str, Any]) -> None:
    rope = read(without("rope_theta") | spelling).transformer.rope_parameters
    assert {key: rope[key] for key in ("rope_type", "factor", "rope_theta")} == {
        "rope_type": "yarn",
        "factor": 64.0,
        "rope_theta": 50000.0,
    }


def test_two_rope_bases_stop_the_import(read: Any) -> None:
    with pytest.raises(InputError, match="several rope bases"):
        read(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})


def test_two_rope_blocks_that_differ_stop_the_import(read: Any) -> None:
    blocks = {
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0},
        "rope_scaling": {"type": "yarn", "factor": 64.0},
    }
    with pytest.raises(InputError, match=r"factor 32.0 in rope_parameters and 64.0 in rope_scaling"):
        read(CONFIG | blocks)


def test_a_head_without_config_is_not_guessed(read: Any) -> None:
    with pytest.raises(InputError, match="--num-heads or --head-dim"):
        read({})
    with pytest.raises(InputError, match="--rope-theta"):
        read({}, num_heads=9)


def test_flags_complete_a_head_without_config(read: Any) -> None:
    flags = {"num_heads": 9, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    layer = read({}, **flags).transformer
    assert (layer.head_dim, layer.num_key_value_heads) == (64, 3)
    assert layer.rope_parameters["rope_theta"] == 1e5


def test_a_kimi_model_type_on_a_llama_head_is_rewritten(read: Any) -> None:
    assert read(CONFIG | {"model_type": "kimi_k2"}).transformer.model_type == "llama"


def test_midlayer_heads_never_norm_before_the_residual(read: Any) -> None:
    assert read(CONFIG | {"norm_before_residual": True}).norm_before_residual is False


def test_norm_flags_are_read_off_the_tensors(read: Any) -> None:
    assert read(CONFIG, SHAPES | {"input_norm.weight": (1728,)}).norm_before_fc
    assert read(CONFIG, SHAPES | {"fc_norm.0.weight": (576,)}).fc_norm
    assert not read(CONFIG | {"norm_before_fc": True}).norm_before_fc


@pytest.mark.parametrize(
    ("ids", "settled"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, [2, 15, 27]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, [2, 15, 27]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}, [2, 15, 27]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 14, 26]}, [1, 15, 27]),
        ({}, [2, 15, 27]),
        # A drafter of ours may read layer 1: speculators' checkpoints are in vLLM's numbering always.
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 15, 27]}, [1, 15, 27]),
        # Our own export writes both numberings; the top level is vLLM's.
        (
            {
                "eagle_aux_hidden_state_layer_ids": [3, 16, 28],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]},
            },
            [3, 16, 28],
        ),
    ],
)
def test_layer_ids_come_out_in_vllms_numbering_once(
    read: Any, ids: dict[str, Any], settled: list[int]
) -> None:
    assert read(CONFIG | ids).layer_ids == settled


def test_another_hidden_size_is_refused_by_name(read: Any) -> None:
    with pytest.raises(InputError, match=r"fc.weight is \[7168, 21504\]"):
        read(CONFIG, SHAPES | {"fc.weight": (7168, 21504)})


def test_an_eagle_1_head_is_refused_by_name(read: Any) -> None:
    with pytest.raises(InputError, match="EAGLE-1/2 head"):
        read(CONFIG, SHAPES | {"fc.weight": (576, 1152)})
    with pytest.raises(InputError, match="use_aux_hidden_state"):
        read(CONFIG | {"eagle_config": {"use_aux_hidden_state": False}})


@pytest.mark.parametrize("name", ["DFlashDraftModel", "MedusaModel", "DeepSeekMTPModel"])
def test_other_drafters_are_refused_by_their_architecture(read: Any, name: str) -> None:
    with pytest.raises(InputError, match=name):
        read(CONFIG | {"architectures": [name]})


def test_a_quantised_head_is_refused_by_its_config(read: Any) -> None:
    with pytest.raises(InputError, match="quantised"):
        read(CONFIG | {"quantization_config": {"quant_method": "fp8"}})
