"""The drafter: speculators' Eagle3DraftModel in float32, built whole, saved for vLLM, exported for SGLang."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from common import atomic_io, layouts, log
from common.draft_vocab import DraftVocab
from common.errors import InputError, StageError
from common.verifier import Verifier

_LOG = log.get("drafter")


def transformer_of(verifier: Verifier, args: argparse.Namespace) -> LlamaConfig:
    """The layer of a drafter that is trained from scratch: the flags, else the verifier's own geometry.

    Args:
        verifier: its attention must be plain for its geometry to serve; Kimi's is not (MLA).
        args: from `head_flags`: `num_heads`, `num_kv_heads`, `head_dim`, `intermediate_size`,
            `rope_theta`, `rms_norm_eps`, `max_position_embeddings`.

    Raises:
        InputError: the verifier has MLA attention and a flag is missing.
    """
    source = verifier.config
    values = {
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.intermediate_size,
    }
    if getattr(source, "kv_lora_rank", None):
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise InputError(
                f"{verifier.name} has MLA attention, whose geometry does not fit a drafter. From scratch, "
                "pass --num-heads, --num-kv-heads, --head-dim and --intermediate-size (Kimi-K2.5's public "
                "heads: 64, 64, 128, 12288)."
            )
    heads = values["num_attention_heads"] or source.num_attention_heads
    rope = dict(source.rope_parameters) if args.rope_theta is None else {"rope_type": "default"}
    if args.rope_theta is not None:
        rope["rope_theta"] = args.rope_theta
    return LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=values["intermediate_size"] or source.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=values["num_key_value_heads"] or getattr(source, "num_key_value_heads", heads),
        head_dim=values["head_dim"] or getattr(source, "head_dim", None) or verifier.hidden_size // heads,
        rms_norm_eps=args.rms_norm_eps or source.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=args.max_position_embeddings or source.max_position_embeddings,
        tie_word_embeddings=False,
    )


def new_config(
    transformer: LlamaConfig | Qwen3Config,
    verifier: Verifier,
    *,
    layer_ids: list[int],
    draft_vocab_size: int,
    speculative_tokens: int,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> Eagle3SpeculatorConfig:
    """The drafter's config, with every flag that the loaders would otherwise default differently written out.

    Args:
        transformer: the drafter's own layer.
        verifier: the model it drafts for.
        layer_ids: the three aux ids in vLLM's numbering, never the last layer's.
        draft_vocab_size: D.
        speculative_tokens: K, what vLLM proposes unless told otherwise; the TTT steps of the training.
        norm_before_residual: False for `midlayer` heads; vLLM would take an absent value for True.
        norm_before_fc: one norm over the three states side by side.
        fc_norm: one norm for each of the three states.
        norm_output: feed the normed output into the next step.
    """
    architectures = [type(verifier.config).__name__.replace("Config", "ForCausalLM")]
    return Eagle3SpeculatorConfig(
        transformer_layer_config=transformer,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        # speculators' own verifier block has no place for it.
        verifier_revision=verifier.commit,  # type: ignore[call-arg]
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=speculative_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=verifier.name, architectures=verifier.config.architectures or architectures
            ),
        ),
    )


def build(
    config: Eagle3SpeculatorConfig,
    vocab: DraftVocab,
    verifier: Verifier,
    state: dict[str, torch.Tensor] | None = None,
    *,
    train_lm_head: bool = True,
) -> Eagle3DraftModel:
    """A drafter in float32 whose every tensor was set by someone.

    speculators' own loading leaves absent embeddings as untouched memory and reads the verifier without its
    revision or remote code; so the verifier's tensors are put in here.

    Args:
        config: from `new_config`.
        vocab: D must be the config's.
        verifier: gives the embedding (where `state` has none), the frozen head of the training targets, and,
            from scratch, the first lm_head.
        state: our names -> tensors of an imported head; None from scratch. What it lacks starts at random.
        train_lm_head: speculators freezes lm_head always; True unfreezes it.

    Returns:
        The model on the CPU: trainable parameters require a gradient, the verifier's do not.

    Raises:
        InputError: a tensor does not fit.
        StageError: a tensor is not finite after everything was loaded.
    """
    # Flex attention needs a GPU.
    attention = "simple_flex_attention" if torch.cuda.is_available() else "sdpa"
    config.transformer_layer_config._attn_implementation = attention
    model = Eagle3DraftModel(config).float()
    own = vocab_tensors(vocab) | (state or {})
    head = verifier.tensor("lm_head")[torch.from_numpy(vocab.token_ids)]
    own.setdefault("embed_tokens.weight", verifier.tensor("embed_tokens"))
    own.setdefault("lm_head.weight", head)
    own |= {"verifier_lm_head.weight": head, "verifier_norm.weight": verifier.final_norm()}
    _load(model, own)
    # The targets are the verifier's; some heads have another epsilon (1e-6 beside Kimi's 1e-5).
    model.verifier_norm.variance_epsilon = verifier.config.rms_norm_eps
    model.lm_head.weight.requires_grad_(train_lm_head)
    require_finite(model)
    return model


def vocab_tensors(vocab: DraftVocab) -> dict[str, torch.Tensor]:
    """`d2t` [D] int64 and `t2d` [V] bool; none for a full vocabulary, where speculators keeps no map."""
    if vocab.is_full:
        return {}
    return {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)}


def require_finite(model: torch.nn.Module) -> None:
    """Stop at a tensor that holds NaN or infinity, which untouched memory and speculators' sentinel do.

    Raises:
        StageError: names the tensor.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise StageError(
                f"the drafter's {name} {list(tensor.shape)} holds NaN or infinite values before the first "
                "step: it was never loaded, or the checkpoint is damaged."
            )


def require_float32(model: torch.nn.Module) -> None:
    """Stop at a trainable tensor of lower precision: at a finetune's rate bfloat16 norms do not move at all.

    Raises:
        StageError: names the tensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise StageError(
                f"the drafter's {name} is {parameter.dtype}: master weights must be float32, or small steps "
                "round to nothing without an error. Call model.float() first."
            )


def save(model: Eagle3DraftModel, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write `config.json` and a bfloat16 `model.safetensors` that vLLM loads as they are.

    Args:
        model: on any device, float32 masters.
        folder: must not hold another drafter.
        weights: what to write instead of the model's own, by our names.
    """
    state = {
        name: tensor.detach()
        .to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in (weights or model.state_dict()).items()
        if name not in model._keys_to_ignore_on_save
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_io.staged(folder / "model.safetensors") as path:
        save_file(state, path, metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config["dtype"] = config["transformer_layer_config"]["dtype"] = "bfloat16"
    atomic_io.write_json(folder / "config.json", config)


def load(folder: Path, verifier: Verifier, *, train_lm_head: bool = True) -> Eagle3DraftModel:
    """A drafter that `save` (or speculators) wrote, in float32.

    Raises:
        InputError: the folder is no drafter in speculators' format.
    """
    config = read_config(folder)
    state = load_file(folder / "model.safetensors")
    vocab = DraftVocab.full(verifier.vocab_size)
    if "t2d" in state:
        vocab = DraftVocab(torch.nonzero(state["t2d"]).flatten().numpy(), len(state["t2d"]))
    return build(config, vocab, verifier, state, train_lm_head=train_lm_head)


def read_config(folder: Path) -> Eagle3SpeculatorConfig:
    """The config of a drafter in speculators' format.

    Raises:
        InputError: the folder has none.
    """
    raw = atomic_io.read_json(folder / "config.json")
    if raw.get("speculators_model_type") != "eagle3":
        raise InputError(
            f"{folder}: no drafter in speculators' format; import it by 04_train.py --finetune-from"
        )
    return cast(Eagle3SpeculatorConfig, Eagle3SpeculatorConfig.from_pretrained(folder))


def export_specforge(drafter_dir: Path, out_dir: Path, verifier: Verifier) -> None:
    """Write the drafter in SpecForge's layout (`midlayer.*`), which SGLang and SpecForge load, and vLLM too.

    Args:
        drafter_dir: written by `save`.
        out_dir: gets `config.json` and `model.safetensors`.
        verifier: an embedding equal to its own is left out, as SpecForge does.

    Raises:
        InputError: the drafter has something that the layout has no place for.
    """
    config = read_config(drafter_dir)
    if config.norm_before_residual:
        raise InputError(
            f"{drafter_dir} was trained with norm_before_residual, which SpecForge's layout cannot say: "
            "SGLang would compute another residual without an error. Serve it with vLLM."
        )
    state = load_file(drafter_dir / "model.safetensors")
    embedding = verifier.tensor("embed_tokens")
    if torch.equal(state["embed_tokens.weight"], embedding.to(torch.bfloat16)):
        del state["embed_tokens.weight"]
    try:
        renamed = {layouts.SPECFORGE.theirs(name): tensor for name, tensor in state.items()}
    except KeyError as error:
        raise InputError(f"{drafter_dir}: SpecForge's layout has no place for {error}") from None
    out_dir.mkdir(parents=True, exist_ok=True)
    with atomic_io.staged(out_dir / "model.safetensors") as path:
        save_file(renamed, path, metadata={"format": "pt"})
    atomic_io.write_json(out_dir / "config.json", _specforge_config(config))


def _specforge_config(config: Eagle3SpeculatorConfig) -> dict[str, Any]:
    layer = config.transformer_layer_config
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    ids = config.eagle_aux_hidden_state_layer_ids
    assert ids is not None
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
        "attention_bias",
        "mlp_bias",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(layer, name) for name in kept},
        "draft_vocab_size": config.draft_vocab_size,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": False,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        # vLLM reads the top level in its own numbering; SGLang the nested ids, which are one lower.
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in ids],
        },
    }


def _load(model: Eagle3DraftModel, state: dict[str, torch.Tensor]) -> None:
    wanted = model.state_dict()
    for name, tensor in state.items():
        if name not in wanted:
            raise InputError(
                f"the drafter has no tensor {name} (found {list(tensor.shape)}); its config disagrees"
            )
        if wanted[name].shape != tensor.shape:
            raise InputError(
                f"{name} is {list(tensor.shape)}, the drafter's config wants {list(wanted[name].shape)}"
            )
    model.load_state_dict(state, strict=False)
