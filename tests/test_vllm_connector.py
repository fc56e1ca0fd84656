"""States from a real vLLM server equal those of transformers, and training online that from disk."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import atomic_io, manifest, vllm_server
from common.hidden_states import HiddenStateStore
from common.store_forms import StoreForm
from common.verifier import Verifier
from tests.conftest import load_script
from tests.reference_states import TEXTS, relative_errors, write_rows
from tests.tiny_verifiers import DEEPSEEK_IDS, DEEPSEEK_LAYERS, save_deepseek_v3, save_kimi_k25

pytestmark = pytest.mark.vllm
TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "32", "--intermediate-size", "64"]


def test_states_of_a_llama_verifier_equal_those_of_transformers(verifier_dir: Path, run_dir: Path) -> None:
    rows = write_rows(run_dir / "dataset", verifier_dir)
    arguments = ["--run-dir", str(run_dir), "--verifier", str(verifier_dir), "--serve"]
    arguments += ["--store-dtype", "mixed", "--compress", "zstd"]
    assert load_script("03_capture_hidden").main(arguments) == 0
    store = HiddenStateStore(run_dir / "hidden_states", 576, form=StoreForm("mixed", "zstd"))
    *aux, last = relative_errors(store, rows, verifier_dir, [2, 15, 27])
    assert max(aux) < 6e-2  # of which fp8 makes 2.7e-2
    assert last < 5e-2
    assert not (run_dir / "hidden_states" / ".incoming").exists()


@pytest.fixture(scope="module")
def kimi(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with rows and a vocabulary for a tiny verifier of Kimi-K2.5's shape.

    Latent attention and experts, nested beside a vision tower; `inner/` holds the language model alone.
    """
    folder = tmp_path_factory.mktemp("kimi")
    tiny = save_kimi_k25(folder / "verifier", save_deepseek_v3(folder / "inner", verifier_dir))
    write_rows(folder / "dataset", tiny, [text[number:] for number in range(3) for text in TEXTS])
    record = manifest.Manifest(stage="01b_generate_synthetic", config={})
    record.facts = {"verifier": str(tiny)}
    record.write(folder / "dataset")
    assert (
        load_script("02_build_vocab_map").main(["--run-dir", str(folder), "--draft-vocab-size", "512"]) == 0
    )
    return folder


@pytest.fixture(scope="module")
def server(kimi: Path) -> Iterator[list[str]]:
    """One that hands out states, and where it puts them."""
    shared = kimi / "shared"
    shared.mkdir()
    extra = vllm_server.capture_args(DEEPSEEK_IDS, DEEPSEEK_LAYERS, shared)
    args = argparse.Namespace(
        serve=True, endpoint=None, server_args="--language-model-only", server_timeout=600.0, port=None
    )
    model = Verifier(str(kimi / "verifier"))
    log_file = kimi / "logs" / "server.log"
    with vllm_server.serving(args, model, [*extra, "--max-model-len", "1024"], log_file) as (url,):
        yield ["--endpoint", url, "--shared-folder", str(shared)]


@pytest.fixture(scope="module")
def captured(kimi: Path, server: list[str]) -> Path:
    arguments = ["--run-dir", str(kimi), "--verifier", str(kimi / "verifier"), *server]
    assert load_script("03_capture_hidden").main([*arguments, "--layer-ids", *map(str, DEEPSEEK_IDS)]) == 0
    return kimi


def test_states_of_a_verifier_of_kimi_k25s_shape_equal_those_of_transformers(captured: Path) -> None:
    from common import dataset

    store = HiddenStateStore(captured / "hidden_states", 128)
    rows = [row["input_ids"].tolist() for row in dataset.load(captured / "dataset")]
    assert max(relative_errors(store, rows, captured / "inner", DEEPSEEK_IDS)) < 5e-2


def train(run: Path, *flags: str) -> int:
    recipe = ["--lr", "1e-3", "--epochs", "2", "--total-seq-len", "256", "--eval-ratio", "0.2"]
    return load_script("04_train").main(["--run-dir", str(run), *TINY, *recipe, *flags])


def curve(run: Path) -> list[float]:
    rows = atomic_io.read_json_lines(run / "checkpoints" / "metrics.jsonl")
    return [row["train"]["loss"] for row in rows if "train" in row]


def test_training_online_gives_the_losses_of_stored_states_and_leaves_no_file(
    captured: Path, server: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, online = tmp_path / "stored", tmp_path / "online"
    assert train(stored, "--data-from", str(captured)) == 0
    online.mkdir()
    for name in ("dataset", "vocab"):
        shutil.copytree(captured / name, online / name)
    asked = ["--hidden-states", "online", *server]
    ids = ["--layer-ids", *map(str, DEEPSEEK_IDS)]
    assert train(online, *asked, *ids) == 0
    assert len(curve(stored)) > 4
    # The server batches requests as they come, which moves the last bits of bfloat16 states.
    assert curve(online) == pytest.approx(curve(stored), rel=1e-3)
    assert not [path for path in Path(server[-1]).rglob("*") if path.suffix != ".lock"]
    assert manifest.read(online / "drafter", "04").facts["layer_ids"] == DEEPSEEK_IDS
    assert set(manifest.read(online / "drafter", "04").inputs) == {"dataset", "vocab"}
    other = tmp_path / "other"
    assert train(other, "--data-from", str(captured), *asked, "--layer-ids", "2", "3", "4") == 2
    assert (
        "the server captures the layers [1, 3, 5, 6], this run wants [2, 3, 4, 6]" in capsys.readouterr().err
    )
    assert not (other / "checkpoints").exists()
