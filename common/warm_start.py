"""A third-party EAGLE-3 head -> our drafter: every tensor planned and shown first, then loaded."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from common import drafter, head_rows, layouts, log
from common.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from common.draft_vocab import DraftVocab, Ids, SourceMap, read_dialect
from common.errors import InputError
from common.head_config import HeadConfig, read_head_config
from common.verifier import Verifier

_LOG = log.get("warm_start")
_MAPS = ("d2t", "t2d")
_FROM_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
# Without these nothing can be said about the head's geometry.
_ESSENTIAL = (
    "fc.weight",
    "lm_head.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.gate_proj.weight",
)


@dataclass(frozen=True)
class TensorLine:
    """One line of the import table.

    Attributes:
        name: ours, or theirs for a tensor that is left out.
        source: the checkpoint's name, the verifier, 02's vocabulary, or `random`.
        status: transferred, re-indexed, filled from verifier, new, or left out.
        reason: why, in a few words.
        shape: as the drafter has it.
    """

    name: str
    source: str
    status: str
    reason: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """An import before any large tensor is read.

    Attributes:
        layout: the recognised layout's name.
        config: of the drafter.
        head: what was settled about the checkpoint's architecture.
        source_map: the checkpoint's vocabulary and the order that sorts its rows.
        vocab: the vocabulary to train with.
        lines: one for each tensor of the checkpoint and of the drafter.
        notes: decisions to show.
        parameters: of the drafter, the embedding and lm_head included.
    """

    layout: str
    checkpoint: Checkpoint
    tensors: Mapping[str, StoredTensor]
    config: Eagle3SpeculatorConfig
    head: HeadConfig
    source_map: SourceMap
    vocab: DraftVocab
    lines: tuple[TensorLine, ...]
    notes: tuple[str, ...]
    parameters: int

    @property
    def move(self) -> head_rows.Move:
        """What becomes of the head's rows."""
        return head_rows.Move.between(self.source_map.vocab, self.vocab)

    @property
    def saved_bytes(self) -> int:
        """Size of the drafter in bfloat16."""
        return 2 * self.parameters

    def report(self) -> dict[str, Any]:
        """For `--report-json`: layout, tensors, draft_vocab."""
        return {
            "layout": self.layout,
            "tensors": [
                {"name": line.name, "source": line.source, "status": line.status, "reason": line.reason}
                for line in self.lines
            ],
            "draft_vocab": self.move.counts(),
        }

    def show(self, token_counts: Ids | None = None) -> None:
        """Log the table, the decisions, and what the rows carry of the data.

        Args:
            token_counts: [V] int64, from 02; None when there are none.
        """
        _LOG.info("%s: layout %s", self.checkpoint.origin, self.layout)
        width = max(len(line.name) for line in self.lines)
        for line in self.lines:
            shape = "x".join(map(str, line.shape))
            _LOG.info("  %-*s  %-12s  %-20s  %s", width, line.name, shape, line.status, line.reason)
        for note in self.notes:
            _LOG.info("  %s", note)
        counts = self.move.counts()
        shares = self.move.shares(token_counts) if token_counts is not None else {}
        rows = ", ".join(
            f"{count} {name}" + (f" ({shares[name]:.1%} of the data's tokens)" if shares else "")
            for name, count in counts.items()
        )
        _LOG.info("  lm_head rows: %s", rows)
        _LOG.info(
            "  %s parameters x 2 bytes = %s in bfloat16",
            log.human_count(self.parameters),
            log.human_bytes(self.saved_bytes),
        )


def open_plan(
    args: argparse.Namespace,
    verifier: Verifier,
    *,
    layer_ids: list[int] | None,
    rebuilt: DraftVocab | None,
    speculative_tokens: int,
) -> Plan:
    """Plan the import that the flags ask for.

    Args:
        args: with the flags of both functions of `head_flags`.
        verifier: the model to draft for.
        layer_ids: of the captured states; None leaves them unchecked (`--probe-layer-ids`).
        rebuilt: 02's vocabulary, for `--draft-vocab rebuild`.
        speculative_tokens: K, written into the config.

    Raises:
        InputError: the checkpoint cannot be imported right; the message says why and what would work.
    """
    checkpoint = open_checkpoint(args.finetune_from, args.finetune_revision)
    return plan_import(
        checkpoint,
        args,
        verifier,
        layer_ids=layer_ids,
        rebuilt=rebuilt,
        speculative_tokens=speculative_tokens,
    )


def plan_import(
    checkpoint: Checkpoint,
    args: argparse.Namespace,
    verifier: Verifier,
    *,
    layer_ids: list[int] | None,
    rebuilt: DraftVocab | None,
    speculative_tokens: int,
) -> Plan:
    """Like `open_plan` for an open checkpoint; reads only d2t and t2d, so shapes suffice for the rest."""
    layout, renamed = layouts.recognise(checkpoint.tensors)
    tensors = {ours: checkpoint.tensors[key] for key, ours in renamed.items() if ours is not None}
    _refuse_missing([name for name in _ESSENTIAL if name not in tensors], checkpoint)
    _refuse_quantised(checkpoint)
    head = read_head_config(checkpoint, tensors, verifier, args, is_midlayer=layout is layouts.SPECFORGE)
    _check_layer_ids(checkpoint, head, layer_ids)
    _refuse_other_vocab(checkpoint, verifier)
    source_map, map_note = _read_map(checkpoint, tensors, verifier)
    vocab = _choose_vocab(args.draft_vocab, source_map, rebuilt, verifier)
    config = drafter.new_config(
        head.transformer,
        verifier,
        layer_ids=head.layer_ids,
        draft_vocab_size=len(vocab),
        speculative_tokens=speculative_tokens,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
    )
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Eagle3DraftModel(config).state_dict().items()}
    lines = _lines(checkpoint, renamed, tensors, wanted, source_map, vocab, args)
    return Plan(
        layout=layout.name,
        checkpoint=checkpoint,
        tensors=tensors,
        config=config,
        head=head,
        source_map=source_map,
        vocab=vocab,
        lines=tuple(lines),
        notes=(*head.notes, map_note),
        parameters=sum(
            int(np.prod(shape)) for name, shape in wanted.items() if name not in (*_MAPS, *_FROM_VERIFIER)
        ),
    )


def read_own_vocab(name: str, verifier: Verifier, *, flag: str) -> SourceMap:
    """The draft vocabulary of a checkpoint, without planning its import.

    Args:
        name: path or hub id.
        verifier: whose tokens the map names.
        flag: where the user gave `name`, for the error.

    Raises:
        InputError: it is no EAGLE-3 head of this verifier's vocabulary.
    """
    checkpoint = open_checkpoint(name, flag=flag)
    _, renamed = layouts.recognise(checkpoint.tensors)
    tensors = {ours: checkpoint.tensors[key] for key, ours in renamed.items() if ours is not None}
    _refuse_missing([name for name in _ESSENTIAL if name not in tensors], checkpoint)
    return _read_map(checkpoint, tensors, verifier)[0]


def load(plan: Plan, verifier: Verifier, *, train_lm_head: bool = True) -> Eagle3DraftModel:
    """Read the tensors and build the drafter that the plan describes.

    Args:
        plan: from `open_plan`.
        verifier: the same.
        train_lm_head: unfreeze lm_head.

    Returns:
        The drafter in float32, every tensor accounted for and finite.
    """
    taken = {line.name for line in plan.lines if line.status in ("transferred", "re-indexed")}
    state = {name: plan.tensors[name].read() for name in taken if name not in (*_MAPS, "lm_head.weight")}
    order = torch.from_numpy(plan.source_map.order)
    trained = plan.tensors["lm_head.weight"].read()[order]
    state["lm_head.weight"] = head_rows.move_rows(
        trained, plan.source_map.vocab, plan.vocab, verifier.tensor("lm_head")
    )
    if "embed_tokens.weight" in plan.tensors:
        _show_embedding(plan.tensors["embed_tokens.weight"].read(), verifier, "embed_tokens.weight" in taken)
    return drafter.build(plan.config, plan.vocab, verifier, state, train_lm_head=train_lm_head)


# ----------------------------------------------------------------------------------------------------------
# What the plan checks


def _refuse_missing(names: list[str], checkpoint: Checkpoint) -> None:
    if names:
        raise InputError(
            f"{checkpoint.origin}: the head has no {names[0]} (nor a name that any layout gives it). Is "
            "this a whole model instead of an EAGLE-3 head? An EAGLE-3 head cannot be rebuilt without it; "
            "download the checkpoint again, or train from scratch."
        )


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    for name, stored in checkpoint.tensors.items():
        is_map = name.split(".")[-1] in _MAPS
        if not is_map and (not stored.dtype.is_floating_point or stored.dtype.itemsize == 1):
            raise InputError(
                f"{checkpoint.origin}: {name} is {stored.dtype}: a quantised head. Its scales would be lost "
                "without an error. Pass the bfloat16 checkpoint that it was made from."
            )


def _check_layer_ids(checkpoint: Checkpoint, head: HeadConfig, captured: list[int] | None) -> None:
    if captured is not None and head.layer_ids != captured:
        raise InputError(
            f"{checkpoint.origin} reads layers {head.layer_ids}, the states were captured from {captured} "
            "(both in vLLM's numbering). The head would be fed other states than it was trained on, "
            "without an error. Capture again with `03_capture_hidden.py --layer-ids "
            f"{' '.join(map(str, head.layer_ids))} --overwrite`, or, if the head's ids are in doubt, "
            "compare both with --probe-layer-ids and settle them by --head-layer-ids."
        )


def _read_map(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], verifier: Verifier
) -> tuple[SourceMap, str]:
    """The checkpoint's vocabulary in canonical form, and what was found."""
    d2t, t2d = (_array(tensors[name].read()) if name in tensors else None for name in _MAPS)
    rows = tensors["lm_head.weight"].shape[0]
    note = ""
    if d2t is not None and d2t.size < rows and not tensors["lm_head.weight"].read()[d2t.size :].any():
        note = f"; {rows - d2t.size} rows of padding (all zero) left out"
        rows = d2t.size
    if rows > verifier.vocab_size:
        raise InputError(
            f"{checkpoint.origin}: lm_head has {rows} rows, {verifier.name} only {verifier.vocab_size} "
            "tokens: this head belongs to another verifier vocabulary. Train from scratch instead."
        )
    source = read_dialect(d2t, t2d, rows=rows, vocab_size=verifier.vocab_size, origin=checkpoint.origin)
    return source, f"draft vocabulary: {len(source.vocab)} of {verifier.vocab_size}, {source.dialect}{note}"


def _array(table: torch.Tensor) -> np.ndarray:
    # numpy has no bfloat16; a map in floating point is refused by name later.
    return (table.float() if table.is_floating_point() else table).numpy()


def _refuse_other_vocab(checkpoint: Checkpoint, verifier: Verifier) -> None:
    said = checkpoint.config.get("vocab_size")
    if said not in (None, verifier.vocab_size, checkpoint.config.get("draft_vocab_size")):
        raise InputError(
            f"{checkpoint.origin}: config.json says vocab_size {said}, {verifier.name} has "
            f"{verifier.vocab_size}: this head belongs to another verifier vocabulary. Train from scratch "
            "instead."
        )


def _choose_vocab(mode: str, source: SourceMap, rebuilt: DraftVocab | None, verifier: Verifier) -> DraftVocab:
    if mode == "checkpoint":
        return source.vocab
    if mode == "full":
        return DraftVocab.full(verifier.vocab_size)
    if rebuilt is None:
        raise InputError("--draft-vocab rebuild needs 02's vocabulary: run 02_build_vocab_map.py first")
    if rebuilt.vocab_size != verifier.vocab_size:
        raise InputError(
            f"02's vocabulary was built for {rebuilt.vocab_size} tokens, {verifier.name} has "
            f"{verifier.vocab_size}. Run 02_build_vocab_map.py --overwrite."
        )
    return rebuilt


def _lines(
    checkpoint: Checkpoint,
    renamed: Mapping[str, str | None],
    tensors: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    source_map: SourceMap,
    vocab: DraftVocab,
    args: argparse.Namespace,
) -> list[TensorLine]:
    """The table: each tensor of the drafter, then each of the checkpoint that has no place in it."""
    theirs = {ours: key for key, ours in renamed.items() if ours is not None}
    lines = []
    missing = []
    for name, shape in wanted.items():
        if name in _FROM_VERIFIER:
            continue
        if name in _MAPS:
            lines.append(TensorLine(name, "vocabulary", *_map_status(args.draft_vocab), shape))
        elif name == "lm_head.weight":
            lines.append(TensorLine(name, theirs[name], *_head_status(source_map, vocab), shape))
        elif name == "embed_tokens.weight" and (name not in tensors or args.embedding == "verifier"):
            reason = "absent from the checkpoint" if name not in tensors else "by --embedding verifier"
            lines.append(TensorLine(name, "verifier", "filled from verifier", reason, shape))
        elif name in tensors:
            if tensors[name].shape != shape:
                raise InputError(
                    f"{checkpoint.origin}: {theirs[name]} is {list(tensors[name].shape)}, the rest of the "
                    f"head wants {list(shape)} for {name}. The checkpoint mixes two heads, or its "
                    "config.json is another's."
                )
            lines.append(
                TensorLine(name, theirs[name], "transferred", f"{tensors[name].dtype} as it is", shape)
            )
        else:
            missing.append(name)
            lines.append(
                TensorLine(name, "random", "new", "absent from the checkpoint, --init-missing", shape)
            )
    if missing and not args.init_missing:
        raise InputError(
            f"{checkpoint.origin}: the head has no {missing[0]} {list(wanted[missing[0]])} ({len(missing)} "
            "such tensors). Starting it at random would cost acceptance without an error; pass "
            "--init-missing if that is meant, or correct num_hidden_layers in config.json."
        )
    for key, ours in renamed.items():
        if ours is None:
            reason = "recomputed, or the verifier's own"
        elif ours in _MAPS and ours not in wanted:
            reason = "a full vocabulary needs no map"
        elif ours not in wanted:
            reason = "the config has no place for it"
        else:
            continue
        lines.append(TensorLine(key, key, "left out", reason, checkpoint.tensors[key].shape))
    return lines


def _map_status(mode: str) -> tuple[str, str]:
    if mode == "checkpoint":
        return "transferred", "the checkpoint's, in canonical form"
    return "new", "02's, rebuilt from this data" if mode == "rebuild" else "the whole vocabulary"


def _head_status(source_map: SourceMap, vocab: DraftVocab) -> tuple[str, str]:
    move = head_rows.Move.between(source_map.vocab, vocab)
    if not len(move.new) and not len(move.dropped):
        moved = not source_map.is_canonical and (source_map.order != np.arange(len(source_map.order))).any()
        return ("re-indexed", "rows sorted by token") if moved else ("transferred", "same tokens, same order")
    return (
        "re-indexed",
        f"{len(move.kept)} rows follow their token, {len(move.new)} carried from the verifier's",
    )


def _show_embedding(own: torch.Tensor, verifier: Verifier, kept: bool) -> None:
    theirs = verifier.tensor("embed_tokens")
    if torch.equal(own.to(theirs.dtype), theirs):
        _LOG.info("  the head's embedding equals the verifier's")
        return
    cosine = torch.nn.functional.cosine_similarity(own.float(), theirs.float(), dim=1).mean().item()
    choice = "kept (--embedding verifier replaces it)" if kept else "replaced by the verifier's"
    _LOG.info(
        "  the head's embedding differs from the verifier's (mean cosine of rows %.4f): %s", cosine, choice
    )
