"""Every stage understands every shipped YAML, to the last key; the demo's prompts are what they claim."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, load_script

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
STAGES = sorted(path.stem for path in ROOT.glob("0*.py"))
PROMPTS = [json.loads(line) for line in (ROOT / "configs" / "demo_prompts.jsonl").read_text().splitlines()]


def resolved(stage: str, config: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """What `--print-config` says."""
    with pytest.raises(SystemExit) as end:
        load_script(stage).main(["--config", str(config), "--print-config", *flags])
    assert end.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)[stage]


def test_there_are_two_configs_and_six_stages() -> None:
    assert [path.name for path in CONFIGS] == ["kimi-k2.5.yaml", "smollm2-demo.yaml"]
    assert STAGES == [
        "01_prepare_data",
        "01b_generate_synthetic",
        "02_build_vocab_map",
        "03_capture_hidden",
        "04_train",
        "05_evaluate",
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_parses_every_yaml(stage: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = resolved(stage, config, capsys=capsys)
    for key, value in (yaml.safe_load(config.read_text())[stage] or {}).items():
        assert key in values
        if isinstance(value, int | float) and not isinstance(value, bool):  # `thinking: on` is a choice
            assert values[key] == value


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("stage", STAGES)
def test_help_beside_a_config_exits_0(stage: str, config: Path) -> None:
    with pytest.raises(SystemExit) as end:
        load_script(stage).main(["--config", str(config), "--help"])
    assert end.value.code == 0


def test_a_flag_wins_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    demo = ROOT / "configs" / "smollm2-demo.yaml"
    values = resolved("02_build_vocab_map", demo, "--draft-vocab-size", "512", capsys=capsys)
    assert values["draft-vocab-size"] == 512


def test_kimi_config_names_what_must_not_drift(capsys: pytest.CaptureFixture[str]) -> None:
    kimi = ROOT / "configs" / "kimi-k2.5.yaml"
    capture = resolved("03_capture_hidden", kimi, capsys=capsys)
    assert capture["layer-ids"] == [2, 30, 58]
    assert capture["trust-remote-code"] is True
    assert {"<|im_end|>=163586", "<think>=163606", "</think>=163607"} <= set(capture["expect-token"])
    assert resolved("01b_generate_synthetic", kimi, capsys=capsys)["thinking"] == "on"


def test_demo_prompts_are_two_domains_of_200_without_duplicates() -> None:
    assert Counter(row["source"] for row in PROMPTS) == {"instructions": 200, "code_math": 200}
    texts = [" ".join(row["conversations"][0]["value"].lower().split()) for row in PROMPTS]
    assert len(set(texts)) == 400


def test_demo_prompts_alternate_and_end_with_the_user() -> None:
    for row in PROMPTS:
        roles = [turn["from"] for turn in row["conversations"]]
        assert roles[0] == roles[-1] == "human"
        assert all(one != other for one, other in pairwise(roles))
    assert sum(len(row["conversations"]) > 1 for row in PROMPTS) >= 20


def test_some_demo_prompts_are_not_english() -> None:
    by_domain = Counter(
        row["source"]
        for row in PROMPTS
        if any(ord(letter) > 127 for letter in row["conversations"][0]["value"])
    )
    assert by_domain["instructions"] >= 10
    assert by_domain["code_math"] >= 5
