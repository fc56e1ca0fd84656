"""common/model_card.py: a card whose every number is a fact of the manifest, before and after 05."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from common import manifest, model_card
from common.manifest import Manifest
from tests.test_evaluation import BASE, TUNED, a_run, alone, answers, results

CONFIG: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    "draft_vocab_size": 32000,
    "norm_before_residual": False,
    "verifier_revision": "abc123",
    "transformer_layer_config": {
        "vocab_size": 163840,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
    },
}


def part(drafts: int, *accepted: int) -> dict[str, Any]:
    shares = [count / drafts for count in accepted]
    return {"acceptance_length": 1 + sum(shares), "by_position": shares, "drafts": drafts}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run" / "drafter"
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(CONFIG))
    record = Manifest(
        stage="04_train",
        config=dict.fromkeys(model_card._SETTINGS)
        | {"lr": 2e-5, "epochs": 2, "ttt_steps": 3, "finetune_from": "org/head"},
        facts={
            "verifier": "moonshotai/Kimi-K2.5",
            "revision": "abc123",
            "thinking": "on",
            "d2t": "feed",
            "coverage": 0.9731,
            "sources": {"math": 900, "code": 50},
            "step0": {"math": part(100, 30, 10), "code": part(100, 20, 0)},
            "best": {"math": part(100, 40, 20), "code": part(100, 20, 10)},
        },
        counts={
            "read": 1000,
            "written": 950,
            "dropped": {"held_out": 48, "no_supervised_token": 0},
            "failed": 2,
            "steps": 1450,
            "best_step": 1000,
        },
    )
    model_card.write(made, record)
    record.write(made)
    return made


def lines(folder: Path) -> list[str]:
    return (folder / "README.md").read_text().splitlines()


def test_the_hub_reads_its_front_matter(folder: Path) -> None:
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model == "moonshotai/Kimi-K2.5"
    assert data.library_name == "speculators"
    assert "eagle3" in data.tags


def test_the_card_holds_what_the_drafter_was_made_from_and_for(folder: Path) -> None:
    text = lines(folder)
    assert "Finetuned from org/head." in text
    assert "| revision of the verifier | abc123 |" in text
    assert (
        "| draft vocabulary | 32000 of 163840 tokens, 97.31 % of the training data's supervised tokens |"
        in text
    )
    assert any(line.startswith("| hidden states it reads | after layers 2, 30, 58 (vLLM's") for line in text)
    assert "| rope | rope_theta 50000.0, rope_type default |" in text
    assert "950 rows trained, 48 held out, 2 without states left out." in text
    assert "| math | 900 |" in text


def test_its_results_are_start_beside_best_by_source(folder: Path) -> None:
    text = lines(folder)
    assert "| math | 100 | 1.400 | 1.600 |" in text
    assert "| code | 100 | 1.200 | 1.300 |" in text
    assert "| all | 200 | 1.300 | 1.450 |" in text
    assert any(line.startswith("Acceptance and speed on a server have not been measured.") for line in text)


def test_it_says_how_to_serve_and_publish(folder: Path) -> None:
    text = "\n".join(lines(folder))
    assert "    vllm serve moonshotai/Kimi-K2.5 --revision abc123 \\\n" in text
    assert '"model": "ORGANISATION/NAME", "num_speculative_tokens": 3}' in text
    assert f"`{folder.parent}/specforge`, which is there only after\n`04_train.py --export specforge`" in text
    assert f"EAGLE3 --speculative-draft-model-path {folder.parent}/specforge" in text
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert f'    hf upload ORGANISATION/NAME {folder} . --exclude manifest.json --exclude ".*"' in text


def test_what_05_measured_takes_the_place_of_its_absence(folder: Path) -> None:
    before = manifest.fingerprint(folder)
    found = results(
        alone(),
        a_run("base", answers(BASE), seconds=8.0),
        a_run("tuned", answers(TUNED), seconds=5.0),
        a_run("other", answers(TUNED)),
    )
    assert model_card.add_served(folder, "tuned", found)
    text = lines(folder)
    (row,) = [
        line
        for line in text
        if line.startswith("| math (in domain) | **this drafter** (tuned) | 2 | 1 | 1.667 [")
    ]
    assert row.endswith("| 2.00 |")
    assert any(line.startswith("| math (in domain) | base | 2 | 1 | 1.222 [") for line in text)
    assert not any("| other |" in line for line in text)
    assert not any("have not been measured" in line for line in text)
    assert "| math | 100 | 1.400 | 1.600 |" in text
    # The drafter is still the one that 05 measured.
    assert manifest.fingerprint(folder) == before


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("theirs")
    assert not model_card.add_served(tmp_path, "tuned", results(alone()))
    assert (tmp_path / "README.md").read_text() == "theirs"
