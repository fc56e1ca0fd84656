"""The gate before the first step: an imported head that accepts nothing was read wrong."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from common import drafter, log, warm_start
from common.acceptance import Acceptance
from common.draft_vocab import Ids
from common.errors import InputError, StageError
from common.verifier import Verifier

_LOG = log.get("step0")
Measure = Callable[[Eagle3DraftModel], Acceptance]


def require_step0(
    model: Eagle3DraftModel,
    plan: warm_start.Plan,
    verifier: Verifier,
    measure: Measure,
    minimum: float,
    token_counts: Ids | None,
) -> Acceptance:
    """Measure the import on held-out rows before the first step, beside a head with random weights.

    Args:
        model: from `load`.
        plan: the same import's.
        verifier: the same.
        measure: a model -> its offline acceptance on held-out rows.
        minimum: share of drafts whose position 0 must be right; on the shared head rows left in another map's
            order gave 0.011 and moved ones 0.23.
        token_counts: [V] int64, from 02, for the diagnosis.

    Returns:
        The import's acceptance.

    Raises:
        StageError: it is below the minimum; the message lists the likely causes, each with a measurement.
    """
    found = measure(model)
    random = measure(drafter.build(plan.config, plan.vocab, verifier))
    _LOG.info(
        "step 0: acceptance length %.3f, position 0 %.3f (random weights: %.3f, %.3f)",
        found.length,
        found.by_position[0],
        random.length,
        random.by_position[0],
    )
    if found.by_position[0] >= minimum:
        return found
    causes = "\n".join(
        f"  {i}. {cause}" for i, cause in enumerate(_causes(model, plan, verifier, measure, token_counts), 1)
    )
    raise StageError(
        f"{plan.checkpoint.origin}: the imported head gets position 0 right in {found.by_position[0]:.3f} "
        f"of the drafts (random weights: {random.by_position[0]:.3f}), less than --min-step0-acceptance "
        f"{minimum}. Training would start from a head that was read wrong. Likely causes, in this "
        f"order:\n{causes}"
    )


def _causes(
    model: Eagle3DraftModel,
    plan: warm_start.Plan,
    verifier: Verifier,
    measure: Measure,
    token_counts: Ids | None,
) -> list[str]:
    """Each likely cause with a measurement: the head under the other reading of one setting."""

    def other(what: str, acceptance: Acceptance) -> str:
        return f"position 0 {acceptance.by_position[0]:.3f} with {what}"

    layer: Any = model.layers[0]
    thetas = {
        10000.0,
        float((getattr(verifier.config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
    }
    ropes = [other(f"theta {theta:g}", _with_rope(model, theta, measure)) for theta in sorted(thetas)]
    layer.norm_before_residual = not layer.norm_before_residual
    flipped = other(f"norm_before_residual {layer.norm_before_residual}", measure(model))
    layer.norm_before_residual = not layer.norm_before_residual
    coverage = f"{plan.vocab.coverage(token_counts):.1%}" if token_counts is not None else "an unknown share"
    kept = torch.from_numpy(plan.move.kept)
    head = verifier.tensor("lm_head")[kept].float()
    rows = model.lm_head.weight.detach().cpu()[
        torch.from_numpy(np.searchsorted(plan.vocab.token_ids, plan.move.kept))
    ]
    cosine = torch.nn.functional.cosine_similarity(head, rows, dim=1).mean().item()
    return [
        f"layer ids: the states are of layers {plan.head.layer_ids}; compare with one id higher by "
        "--probe-layer-ids",
        f"rope: {', '.join(ropes)}",
        f"norm placement: {flipped}",
        f"map: {plan.source_map.dialect}; the training vocabulary covers {coverage} of the data's tokens",
        f"another verifier: kept rows have a mean cosine of {cosine:.3f} with {verifier.name}'s own",
    ]


def _with_rope(model: Eagle3DraftModel, theta: float, measure: Measure) -> Acceptance:
    """The head's acceptance under another rotary base."""
    original: Any = model.rotary_emb
    config = copy.deepcopy(original.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model.rotary_emb = type(original)(config).to(original.inv_freq.device)
    try:
        return measure(model)
    finally:
        model.rotary_emb = original


def probe_layer_ids(
    args: argparse.Namespace,
    verifier: Verifier,
    captured: list[int],
    candidates: list[list[int]],
    measure: Callable[[Eagle3DraftModel, list[int]], Acceptance],
) -> list[int]:
    """Measure the imported head on the states of each candidate set and recommend one.

    Args:
        args: with the flags of `head_flags.add_warm_start_arguments`; the head keeps its own vocabulary.
        verifier: the model to draft for.
        captured: ids of the captured aux states, a superset of all candidates.
        candidates: sets of three ids in vLLM's numbering.
        measure: a model and the columns of its three states among the captured ones -> acceptance.

    Returns:
        The candidate with the greatest acceptance length.

    Raises:
        InputError: a candidate's layer was not captured.
    """
    args = argparse.Namespace(**{**vars(args), "draft_vocab": "checkpoint"})
    model = warm_start.load(
        warm_start.open_plan(args, verifier, layer_ids=None, rebuilt=None, speculative_tokens=3), verifier
    )
    results = []
    for ids in candidates:
        absent = [layer_id for layer_id in ids if layer_id not in captured]
        if absent:
            wanted = " ".join(map(str, sorted({i for candidate in candidates for i in candidate})))
            raise InputError(
                f"--probe-layer-ids {' '.join(map(str, ids))}: layer {absent[0]} is not among the captured "
                f"ones {captured}. Capture a few rows of all: 03_capture_hidden.py --probe 32 "
                f"--layer-ids {wanted}."
            )
        acceptance = measure(model, [captured.index(layer_id) for layer_id in ids])
        _LOG.info(
            "layer ids %s: acceptance length %.3f, position 0 %.3f",
            ids,
            acceptance.length,
            acceptance.by_position[0],
        )
        results.append((acceptance.length, ids))
    best = max(results)[1]
    best_ids = " ".join(map(str, best))
    _LOG.info(
        "recommended: 03_capture_hidden.py --layer-ids %s, 04_train.py --head-layer-ids %s",
        best_ids,
        best_ids,
    )
    return best
