"""States captured through a real vLLM server equal those of transformers, for both attention families."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.hidden_states import HiddenStateStore
from tests.conftest import load_script
from tests.reference_states import relative_errors, write_rows
from tests.tiny_verifiers import DEEPSEEK_IDS, save_deepseek_v3

pytestmark = pytest.mark.vllm


def test_states_of_a_llama_verifier_equal_those_of_transformers(verifier_dir: Path, run_dir: Path) -> None:
    rows = write_rows(run_dir / "dataset", verifier_dir)
    arguments = ["--run-dir", str(run_dir), "--verifier", str(verifier_dir), "--serve"]
    assert load_script("03_capture_hidden").main(arguments) == 0
    store = HiddenStateStore(run_dir / "hidden_states", 576)
    assert max(relative_errors(store, rows, verifier_dir, [2, 15, 27])) < 5e-2
    assert not (run_dir / "hidden_states" / ".incoming").exists()


def test_states_of_a_latent_attention_and_experts_verifier_equal_those_of_transformers(
    verifier_dir: Path, run_dir: Path
) -> None:
    tiny = save_deepseek_v3(run_dir / "deepseek", verifier_dir)
    rows = write_rows(run_dir / "dataset", verifier_dir)
    arguments = [
        "--run-dir",
        str(run_dir),
        "--verifier",
        str(tiny),
        "--serve",
        "--layer-ids",
        *map(str, DEEPSEEK_IDS),
    ]
    assert load_script("03_capture_hidden").main(arguments) == 0
    store = HiddenStateStore(run_dir / "hidden_states", 128)
    assert max(relative_errors(store, rows, tiny, DEEPSEEK_IDS)) < 5e-2
