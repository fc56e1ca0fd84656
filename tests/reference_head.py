"""A slow EAGLE-3 head in plain torch, read straight from a SpecForge file: what every import must compute."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

HEADS, KV_HEADS, DIM, THETA, EPS = 9, 3, 64, 100000.0, 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Llama's rotary embedding: the first half of a head pairs with its second half."""
    angle = positions[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def first_step_logits(
    tensors: dict[str, torch.Tensor], embedding: torch.Tensor, ids: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Draft logits of the first step.

    Args:
        tensors: a SpecForge head's.
        embedding: [V, H], the verifier's.
        ids: [T] token ids.
        states: [T, 4, H] captured; position t sees states t and token t + 1.

    Returns:
        [T - 1, D]; row t ranks the candidates for token t + 2.
    """
    head = {name: t.float() for name, t in tensors.items() if t.is_floating_point()}
    length = len(ids) - 1
    hidden = states[:-1, :3].float().flatten(1) @ head["fc.weight"].T
    embedded = rms_norm(embedding[ids[1:]].float(), head["midlayer.input_layernorm.weight"])
    both = torch.cat([embedded, rms_norm(hidden, head["midlayer.hidden_norm.weight"])], dim=-1)

    def project(name: str, heads: int) -> torch.Tensor:
        return (
            (both @ head[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, heads, DIM).transpose(0, 1)
        )

    positions = torch.arange(1.0, length + 1)
    q = rotate(project("q", HEADS), positions)
    k = rotate(project("k", KV_HEADS), positions).repeat_interleave(HEADS // KV_HEADS, dim=0)
    v = project("v", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, dim=0)
    attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(length, -1)
    hidden = hidden + attended @ head["midlayer.self_attn.o_proj.weight"].T
    normed = rms_norm(hidden, head["midlayer.post_attention_layernorm.weight"])
    gate = silu(normed @ head["midlayer.mlp.gate_proj.weight"].T)
    up = normed @ head["midlayer.mlp.up_proj.weight"].T
    hidden = hidden + (gate * up) @ head["midlayer.mlp.down_proj.weight"].T
    return rms_norm(hidden, head["norm.weight"]) @ head["lm_head.weight"].T
