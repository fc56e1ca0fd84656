"""04's offline estimate and an imported drafter against what a server counts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, load_script
from tests.test_warm_start import FLAGS

pytestmark = pytest.mark.vllm
PROMPTS, TOKENS, K = 32, 96, 3


def run(stem: str, *argv: str | Path) -> None:
    assert load_script(stem).main([str(word) for word in argv]) == 0


@pytest.fixture(scope="module")
def measured(
    verifier_dir: Path, public_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Answers at temperature 0, 04's estimate on them, and what 05 reads for the same prompts."""
    from common import drafter, warm_start
    from common.verifier import Verifier

    folder = tmp_path_factory.mktemp("served")
    common = ("--run-dir", folder)
    serve = ("--serve", "--server-args=--max-model-len 1024")
    demo = ROOT / "configs" / "demo_prompts.jsonl"
    run(
        "01_prepare_data",
        *common,
        "--dataset",
        demo,
        "--max-samples",
        PROMPTS,
        "--eval-prompts",
        0,
        "--workers",
        1,
    )
    greedy = ("--temperature", 0, "--max-tokens", TOKENS, "--concurrency", 16)
    run("01b_generate_synthetic", *common, "--verifier", verifier_dir, *serve, *greedy)
    run("03_capture_hidden", *common, "--backend", "transformers", "--dtype", "float32")
    head = ("--finetune-from", public_head, "--draft-vocab", "checkpoint")
    report = folder / "report.json"
    # One row to train, which a dry run never does; all others are measured.
    held_out = ("--eval-ratio", 0.97, "--total-seq-len", 1024)
    run("04_train", *common, *head, *held_out, "--ttt-steps", K, "--dry-run", "--report-json", report)

    model = Verifier(str(verifier_dir))
    args = argparse.Namespace(**{**vars(FLAGS), "finetune_from": str(public_head)})
    plan = warm_start.open_plan(args, model, layer_ids=[2, 15, 27], rebuilt=None, speculative_tokens=K)
    drafter.save(warm_start.load(plan, model), folder / "imported")
    drafter.export_specforge(folder / "imported", folder / "exported", model)
    named = [f"raw={public_head}", f"imported={folder / 'imported'}", f"exported={folder / 'exported'}"]
    run(
        "05_evaluate",
        *(*common, *serve, "--prompts", folder / "prompts" / "train.jsonl"),
        *("--max-tokens", TOKENS, "--concurrency", 8, "--num-speculative-tokens", K),
        *(word for name in named for word in ("--drafter", name)),
    )
    results = json.loads((folder / "evaluation" / "results.json").read_text())
    served = {entry["drafter"]: entry for entry in results["runs"]}
    return {"offline": json.loads(report.read_text())["step0"], "served": served}


def test_the_offline_estimate_is_what_the_server_accepts(measured: dict[str, Any]) -> None:
    offline, served = measured["offline"], measured["served"]["imported"]
    assert offline["acceptance_length"] == pytest.approx(served["acceptance_length"], rel=0.15)
    assert offline["by_position"][0] == pytest.approx(served["acceptance_by_position"][0], rel=0.15)


@pytest.mark.parametrize("name", ["imported", "exported"])
def test_an_imported_head_has_the_acceptance_counters_of_its_source(
    measured: dict[str, Any], name: str
) -> None:
    counters = ("drafts", "acceptance_by_position", "output_tokens")
    raw, ours = measured["served"]["raw"], measured["served"][name]
    assert {key: ours[key] for key in counters} == {key: raw[key] for key in counters}
