"""What several tests need: the demo's verifier, a run folder, the numbered scripts as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
def kimi_like_dir(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with a chat template that does what Kimi's does (`tests/kimi_like.jinja`)."""
    folder = tmp_path_factory.mktemp("verifiers") / "smollm2-kimi-like"
    folder.mkdir()
    for file in verifier_dir.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text((ROOT / "tests" / "kimi_like.jinja").read_text())
    return folder
