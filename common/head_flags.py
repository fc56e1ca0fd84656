"""Flags of the drafter's layer and of the warm start, apart from both: `--help` must not wait for torch."""

from __future__ import annotations

import argparse


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the drafter's layer: from scratch, and for what a head's config.json leaves open."""
    group = parser.add_argument_group(
        "Drafter's layer (from scratch: default the verifier's; --finetune-from: only what its config.json "
        "lacks)"
    )
    group.add_argument("--num-heads", type=int, help="attention heads")
    group.add_argument("--num-kv-heads", type=int, help="key and value heads")
    group.add_argument("--head-dim", type=int, help="size of a head")
    group.add_argument("--intermediate-size", type=int, help="width of the gated MLP")
    group.add_argument("--rope-theta", type=float, help="base of the rotary embedding, without scaling")
    group.add_argument("--rms-norm-eps", type=float, help="epsilon of the drafter's norms")
    group.add_argument("--max-position-embeddings", type=int, help="longest position, in tokens")


def add_warm_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `--finetune-from`."""
    group = parser.add_argument_group("Warm start")
    group.add_argument("--finetune-from", metavar="PATH|HUB_ID", help="an EAGLE-3 head in any known layout")
    group.add_argument("--finetune-revision", help="hub branch, tag or commit of --finetune-from")
    group.add_argument(
        "--draft-vocab",
        choices=("rebuild", "checkpoint", "full"),
        default="rebuild",
        help="02's vocabulary, the head's own, or the verifier's whole vocabulary",
    )
    group.add_argument(
        "--embedding",
        choices=("checkpoint", "verifier"),
        default="checkpoint",
        help="whose embedding to take; a head without its own always gets the verifier's",
    )
    group.add_argument(
        "--init-missing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="start tensors that the head lacks (a second layer, say) at random instead of stopping",
    )
    group.add_argument(
        "--head-layer-ids",
        nargs=3,
        type=int,
        metavar="ID",
        help="layers that the head reads, in vLLM's numbering, where its config is silent or wrong",
    )
    group.add_argument(
        "--probe-layer-ids",
        action="append",
        nargs=3,
        type=int,
        metavar="ID",
        help="measure the head on these layers' states of `03 --probe`; repeat for each candidate; then stop",
    )
    group.add_argument(
        "--min-step0-acceptance",
        type=float,
        default=0.05,
        help="share of drafts with position 0 right below which the run stops before its first step",
    )
