"""Third-party checkpoint layouts: their tensor names -> ours, as tables that are read in both directions.

Ours are the names of speculators' `Eagle3DraftModel`. `{}` stands for a number (a layer, an aux state); None
means left out on purpose. This module knows names only; shapes and values belong to `common.warm_start`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import InputError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# torch's DataParallel and DDP wrap the whole model, whatever its layout.
_WRAPPER = "module."

_IN_LAYER = (
    *(f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
    *(f"self_attn.{p}_norm.weight" for p in "qk"),
    *(f"mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")),
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
)
_BODY = ("fc.weight", "norm.weight", "embed_tokens.weight", "input_norm.weight", "fc_norm.{}.weight")
_HEAD = ("lm_head.weight", "d2t", "t2d")
# Recomputed from the config, or the verifier's own and filled in again.
_DERIVED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class Layout:
    """One family's names.

    Attributes:
        name: as `--export` and the report say it.
        families: whose checkpoints have it, for the user.
        table: their name -> our name, None for left out.
    """

    name: str
    families: str
    table: dict[str, str | None]

    def ours(self, theirs: str) -> str | None:
        """Our name for one of theirs, None when it is left out on purpose.

        Raises:
            KeyError: the table does not know it.
        """
        numbers = _NUMBER.findall(theirs)
        ours = self.table[_NUMBER.sub("{}", theirs)]
        return None if ours is None else ours.format(*numbers)

    def theirs(self, ours: str) -> str:
        """Their name for one of ours: the same table, read backwards.

        Raises:
            KeyError: this layout has no place for it (a second layer in a `midlayer` checkpoint, say).
        """
        numbers = _NUMBER.findall(ours)
        inverse = {target: source for source, target in reversed(self.table.items())}
        if ours in inverse:
            return inverse[ours]
        return inverse[_NUMBER.sub("{}", ours)].format(*numbers)


def _table(layer: str, our_layer: str, body: str = "", heads: Iterable[str] = ("",)) -> dict[str, str | None]:
    """Names below `layer`, below the prefix `body`, and lm_head/d2t/t2d below each prefix of `heads`."""
    table: dict[str, str | None] = {f"{layer}.{name}": f"{our_layer}.{name}" for name in _IN_LAYER}
    table |= {body + name: name for name in _BODY}
    table |= {prefix + name: name for prefix in heads for name in _HEAD}
    table |= {body + name: None for name in _DERIVED}
    table[f"{layer}.self_attn.rotary_emb.inv_freq"] = None
    return table


SPECFORGE = Layout("specforge", "SafeAILab, SpecForge, AQ-MedAI, AngelSlim", _table("midlayer", "layers.0"))
SPECULATORS = Layout("speculators", "speculators, ModelOpt's exports", _table("layers.{}", "layers.{}"))
LAYOUTS = (
    SPECFORGE,
    SPECULATORS,
    *(
        Layout(
            "modelopt",
            f"ModelOpt ({prefix}*)",
            _table(f"{prefix}layers.{{}}", "layers.{}", prefix, (prefix, "")),
        )
        for prefix in ("eagle_module.", "draft_model.")
    ),
    Layout("automodel", "NeMo Automodel", _table("model.layers.{}", "layers.{}", "model.", ("", "model."))),
)

# What a checkpoint may be instead of an EAGLE-3 head: pattern of a tensor name, what it is, what would work.
_FOREIGN = (
    (
        r"q_a_proj|kv_a_proj_with_mqa|kv_b_proj",
        "an MLA head",
        "vLLM's and speculators' EAGLE-3 drafts have plain attention. Start from a head with "
        "q_proj/k_proj/v_proj, or train from scratch without --finetune-from",
    ),
    (
        r"weight_scale|weight_packed|qweight|qzeros|\.scales$|_scale_inv|absmax",
        "a quantised head",
        "pass the bfloat16 checkpoint that it was made from",
    ),
    (
        r"medusa|parallel_draft_heads|^\d+\.\d+\.linear\.weight",
        "a Medusa head",
        "Medusa heads predict without an autoregressive layer; train from scratch without --finetune-from",
    ),
    (
        r"eh_proj|(^|\.)enorm|(^|\.)hnorm|(^|\.)mtp\b",
        "an MTP layer",
        "MTP modules belong to their verifier and are served by vLLM's own `mtp` method; train from "
        "scratch without --finetune-from",
    ),
    (
        r"dflash|mask_embedding|mask_hidden|markov|^hidden_norm\.weight",
        "a DFlash or other parallel drafter",
        "convert it with `speculators convert` and train it there; this suite trains EAGLE-3",
    ),
)


def recognise(keys: Iterable[str]) -> tuple[Layout, dict[str, str | None]]:
    """Find the layout whose table knows every key.

    Args:
        keys: the checkpoint's tensor names.

    Returns:
        The layout, and for each key our name (None: left out on purpose).

    Raises:
        InputError: it is no EAGLE-3 head, or a key is in no table, or two keys mean the same tensor.
    """
    keys = list(keys)
    refuse_foreign(keys)
    bare = {key: key.removeprefix(_WRAPPER) for key in keys}
    layout = max(LAYOUTS, key=lambda candidate: sum(_knows(candidate, name) for name in bare.values()))
    unknown = [key for key, name in bare.items() if not _knows(layout, name)]
    if unknown:
        pattern = _NUMBER.sub("{}", bare[unknown[0]])
        near = difflib.get_close_matches(pattern, layout.table, n=1, cutoff=0.0)
        raise InputError(
            f"tensor {unknown[0]!r} is in no layout table (the other keys look like {layout.name}); the "
            f"nearest known name is {near[0]!r}. {len(unknown)} of {len(keys)} keys are unknown. A tensor "
            "that is dropped without a word costs acceptance: add the name to common/layouts.py, or remove "
            "the tensor from the checkpoint."
        )
    renamed = {key: layout.ours(name) for key, name in bare.items()}
    targets = [name for name in renamed.values() if name is not None]
    twice = next((name for name in targets if targets.count(name) > 1), None)
    if twice:
        sources = [key for key, name in renamed.items() if name == twice]
        raise InputError(
            f"tensors {' and '.join(sources)} both mean {twice}: keep one of them in the checkpoint"
        )
    return layout, renamed


def refuse_foreign(keys: Iterable[str]) -> None:
    """Stop, by name, at a checkpoint that is something else than an EAGLE-3 head.

    Raises:
        InputError: what it is and what would work.
    """
    keys = list(keys)
    for pattern, what, advice in _FOREIGN:
        hit = next((key for key in keys if re.search(pattern, key)), None)
        if hit:
            raise InputError(f"this is {what} (tensor {hit!r}), not an EAGLE-3 head: {advice}.")
    later = ("hidden_norm.weight", ".norm.weight", "lm_head.weight")
    if any(key.endswith("fc.weight") for key in keys) and not any(f".{key}".endswith(later) for key in keys):
        raise InputError(
            "this is an EAGLE-1/2 head (an fc, but no hidden_norm, final norm or lm_head), not an EAGLE-3 "
            "head: it reads one hidden state and not three. Start from an EAGLE-3 head, or train from "
            "scratch without --finetune-from."
        )


def _knows(layout: Layout, name: str) -> bool:
    return _NUMBER.sub("{}", name) in layout.table
