"""Random verifiers of a few megabytes, with SmolLM2's tokenizer, that transformers and vLLM both load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

DEEPSEEK_LAYERS = 6
DEEPSEEK_IDS = [1, 3, 5]


def save_deepseek_v3(folder: Path, tokenizer_from: Path) -> Path:
    """Kimi's architecture in small: multi-head latent attention, a dense layer, then mixtures of experts.

    vLLM's CPU kernel for latent attention wants kv_lora_rank 512 and qk_rope_head_dim 64.
    """
    import torch
    from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=DEEPSEEK_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=4096,
        # Scaled, as Kimi's: with plain positions vLLM 0.32 turns a query of several heads wrongly on a CPU
        # (its kernel takes [T, heads, 64] for one head), which shows in the first layer as an error of 6 %.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # In its class these are no fields; vLLM reads them from the file.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms of 1 would make a norm applied twice invisible.
            if name.endswith("norm.weight"):
                weight.uniform_(0.2, 3.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def save_kimi_k25(folder: Path, language_model: Path) -> Path:
    """Kimi-K2.5's shape: a nested `text_config`, and the tensors of `save_deepseek_v3` as `language_model.*`.

    The vision tower has no tensors: capture uses none of it.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    text = json.loads((language_model / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": {**text, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        "projection_hidden_size": 64,
        "image_token_id": 4,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # vLLM reads it at its start, also where it is told to serve the language model only.
    images = {
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "in_patch_limit": 64,
        "patch_limit_on_one_side": 8,
        "fixed_output_tokens": None,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 64,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))
    tensors = load_file(language_model / "model.safetensors")
    save_file({f"language_model.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(language_model / name, folder / name)
    return folder
