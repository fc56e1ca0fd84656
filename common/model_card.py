"""`drafter/README.md`: what the drafter was made from, what it is worth, how it is served and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import atomic_io, manifest
from common.acceptance import Acceptance, total
from common.manifest import Manifest

NAME = "README.md"
_TEMPLATE = Path(__file__).with_suffix(".md")
_STAGE = "04_train"
_SETTINGS = (
    *("lr", "optimizer", "scheduler", "warmup_ratio", "weight_decay", "epochs", "max_steps"),
    *("max_time", "total_seq_len", "gradient_accumulation_steps", "anchor"),
    *("train_lm_head", "draft_vocab", "seed"),
)


def write(folder: Path, record: Manifest, served: list[dict[str, Any]] | None = None) -> None:
    """Write the card of a drafter.

    Args:
        folder: `drafter/` with its config.json.
        record: 04's manifest, written already or about to be.
        served: rows of the table of what 05 measured, from `_served`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    facts, config = record.facts, atomic_io.read_json(folder / "config.json")
    verifier, layer = facts["verifier"], config["transformer_layer_config"]
    data = ModelCardData(
        # A folder's name means nothing on the hub.
        base_model=None if Path(verifier).exists() else verifier,
        library_name="speculators",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "draft-model", "vllm"],
    )
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(),
        verifier=verifier,
        revision=config.get("verifier_revision"),
        start=record.config["finetune_from"],
        layer_ids=config["eagle_aux_hidden_state_layer_ids"],
        draft_vocab_size=config["draft_vocab_size"],
        vocab_size=layer["vocab_size"],
        coverage=facts.get("coverage"),
        d2t=facts["d2t"],
        norm_before_residual=config["norm_before_residual"],
        rope=", ".join(f"{key} {value}" for key, value in sorted(layer["rope_parameters"].items())),
        thinking=facts.get("thinking", "not recorded"),
        k=record.config["ttt_steps"],
        rows=record.counts["written"],
        held_out=record.counts["dropped"]["held_out"],
        failed=record.counts["failed"],
        sources=facts["sources"],
        steps=record.counts["steps"],
        best_step=record.counts["best_step"],
        settings=", ".join(
            f"{name} {record.config[name]}" for name in _SETTINGS if record.config[name] is not None
        ),
        offline=_offline(facts["step0"], facts["best"]),
        served=served or [],
        revision_flag=f" --revision {facts['revision']}" if facts.get("revision") else "",
        specforge=folder.parent / "specforge",
        folder=folder,
    )
    with atomic_io.replacing(folder / NAME) as file:
        file.write(str(card))


def add_served(folder: Path, name: str, results: dict[str, Any]) -> bool:
    """Put what 05 measured into the card of a drafter that 04 made.

    Args:
        folder: of any drafter.
        name: the drafter's in `results`.
        results: `results.json`.

    Returns:
        False for a folder without such a card, which is left alone.
    """
    if not (folder / NAME).exists() or not (folder / manifest.NAME).exists():
        return False
    record = manifest.read(folder, f"{_STAGE}.py")
    if record.stage != _STAGE or "sources" not in record.facts:
        return False
    write(folder, record, _served(name, results))
    return True


def _offline(start: dict[str, Any], best: dict[str, Any]) -> list[dict[str, Any]]:
    before = {source: Acceptance.from_json(row) for source, row in start.items()}
    after = {source: Acceptance.from_json(row) for source, row in best.items()}
    rows = [
        {"source": source, "drafts": part.drafts, "before": before[source].length, "after": part.length}
        for source, part in after.items()
    ]
    whole = total(after.values())
    all_of_them = {
        "source": "all",
        "drafts": whole.drafts,
        "before": total(before.values()).length,
        "after": whole.length,
    }
    return [*rows, all_of_them] if len(rows) > 1 else rows


def _served(name: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of this drafter and of the one that it was compared with, as rows of the card's table."""
    from common import evaluation

    rows = []
    for run in results["runs"]:
        if run["drafter"] not in (name, results["start"]):
            continue
        domain = evaluation.DOMAIN[run["in_domain"]]
        sure = run["acceptance_length_interval"]
        interval = f" [{sure[0]:.3f}, {sure[1]:.3f}]" if sure else ""
        rows.append(
            {
                "prompts": run["prompt_set"] + (domain and f" ({domain})"),
                "drafter": f"**this drafter** ({name})" if run["drafter"] == name else run["drafter"],
                "k": run["num_speculative_tokens"],
                "streams": run["concurrency"],
                "length": f"{run['acceptance_length']:.3f}{interval}",
                "speed_up": "-" if run["speed_up"] is None else f"{run['speed_up']:.2f}",
            }
        )
    return rows
