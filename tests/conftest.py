"""What several tests need: the demo's verifier, a run folder, the numbered scripts as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import dialects

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load_script(stem: str) -> ModuleType:
    """A numbered script as a module (its name is no identifier, so `import` cannot)."""
    if stem in sys.modules:
        return sys.modules[stem]
    spec = importlib.util.spec_from_file_location(stem, ROOT / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """SmolLM2-135M-Instruct, built once by the module that the demo uses."""
    from common import demo_verifier

    return demo_verifier.ensure()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run folder."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def public_head() -> Path:
    """The real SmolLM2 EAGLE-3 head in SpecForge's layout; skips where the shared folder is absent."""
    folder = SHARED / "checkpoints" / "smollm2-eagle3-midlayer"
    if not folder.exists():
        pytest.skip("the shared checkpoint is not here")
    return folder


@pytest.fixture(scope="session")
def midlayer_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what needs no training: the real head where it is, else one of its form with random weights."""
    if (real := SHARED / "checkpoints" / "smollm2-eagle3-midlayer").exists():
        return real
    folder = tmp_path_factory.mktemp("heads") / "untrained"
    dialects.untrained(folder)
    return folder


@pytest.fixture(scope="session")
def kimi_like_dir(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with a chat template that does what Kimi's does (`tests/kimi_like.jinja`)."""
    folder = tmp_path_factory.mktemp("verifiers") / "smollm2-kimi-like"
    folder.mkdir()
    for file in verifier_dir.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text((ROOT / "tests" / "kimi_like.jinja").read_text())
    return folder


@pytest.fixture(scope="session")
def captured_run(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with dataset/ and hidden_states/: SmolLM2's own answers to 40 of the demo's prompts.

    The token ids in tests/data are what vLLM answered at temperature 0.7; the states are captured here, by
    stage 03's transformers backend.
    """
    from common import atomic_io, dataset, manifest
    from common.verifier import Verifier

    run = tmp_path_factory.mktemp("captured")
    rows: list[dataset.TrainingRow] = []
    for number, answer in enumerate(
        atomic_io.read_json_lines(ROOT / "tests" / "data" / "smollm2_answers.jsonl")
    ):
        prompt, generated = answer["prompt_token_ids"], answer["token_ids"]
        rows.append(
            {
                "input_ids": prompt + generated,
                "loss_mask": [0] * len(prompt) + [1] * len(generated),
                "seq_len": len(prompt) + len(generated),
                "id": f"{number:04d}#0",
                "source": answer["source"],
            }
        )
    dataset.write(run / "dataset", rows)
    record = manifest.Manifest(stage="01b_generate_synthetic", config={})
    record.facts = Verifier(str(verifier_dir)).facts()
    record.write(run / "dataset")
    argv = ["--run-dir", str(run), "--backend", "transformers", "--dtype", "float32"]
    assert load_script("03_capture_hidden").main(argv) == 0
    return run
