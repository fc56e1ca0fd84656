"""common/load_test.py: vLLM's own classes load a good folder, and what is wrong with a bad one is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

from common import drafter, load_test
from common.draft_vocab import DraftVocab
from common.verifier import Verifier
from tests.conftest import ROOT

pytestmark = pytest.mark.vllm
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
D = 500  # no multiple of 64, to which vLLM pads the rows of lm_head


def residual_left_out(config: dict[str, Any], _: Any) -> None:
    del config["norm_before_residual"]


def two_layer_ids(config: dict[str, Any], _: Any) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [2, 15]


def unknown_rope(config: dict[str, Any], _: Any) -> None:
    config["transformer_layer_config"]["rope_parameters"] |= {"rope_type": "spiral"}


def wrong_shape(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.mlp.down_proj.weight"] = torch.zeros(576, 63)


def unknown_key(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.self_attn.sinks"] = torch.zeros(2)


def no_map(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["d2t"]


def other_architecture(config: dict[str, Any], _: Any) -> None:
    config["transformer_layer_config"]["model_type"] = "kimi_k2"


FAULTS: dict[Change, str] = {
    residual_left_out: "config.json, norm_before_residual: vLLM reads True, trained with False",
    two_layer_ids: "eagle_aux_hidden_state_layer_ids: vLLM reads [2, 15], trained with [2, 15, 27]",
    unknown_rope: "spiral",
    wrong_shape: "layers.0.mlp.down_proj.weight: found [576, 63], expected [576, 64]",
    unknown_key: "layers.0.self_attn.sinks: found [2], expected no such tensor",
    no_map: "d2t: missing, expected [500]",
    other_architecture: "Unsupported model_type kimi_k2",
}


@pytest.fixture(scope="module")
def model(verifier_dir: Path) -> Eagle3DraftModel:
    verifier = Verifier(str(verifier_dir))
    layer = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    config = drafter.new_config(
        layer, verifier, layer_ids=[2, 15, 27], draft_vocab_size=D, speculative_tokens=3
    )
    vocab = DraftVocab(torch.arange(0, 2 * D, 2).numpy(), 49152)
    return drafter.build(config, vocab, verifier)


@pytest.fixture(scope="module")
def answers(model: Eagle3DraftModel, verifier_dir: Path, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """vLLM's answers to a good folder and to each fault, all out of one process."""
    root = tmp_path_factory.mktemp("folders")
    drafter.save(model, root / "good")
    for change in FAULTS:
        folder = root / change.__name__
        shutil.copytree(root / "good", folder)
        config, tensors = (
            json.loads((folder / "config.json").read_text()),
            load_file(folder / "model.safetensors"),
        )
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    code = (
        "import json, pathlib, sys\n"
        "from common import load_test\n"
        "root, verifier = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "ask = lambda folder: {'folder': str(folder), 'verifier': verifier, 'revision': None, "
        "'trust_remote_code': False}\n"
        "answers = {folder.name: load_test.load_in_vllm(ask(folder)) for folder in root.iterdir()}\n"
        "(root / 'answers.json').write_text(json.dumps(answers))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), str(verifier_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((root / "answers.json").read_text())


def test_a_good_folder_has_no_fault(answers: dict[str, Any], model: Eagle3DraftModel) -> None:
    answer = answers["good"]
    assert load_test.faults(answer, model) == []
    assert answer["config"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert answer["tensors"]["lm_head.weight"] == [D, 576]


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_fault_is_named(change: Change, answers: dict[str, Any], model: Eagle3DraftModel) -> None:
    found = load_test.faults(answers[change.__name__], model)
    assert any(FAULTS[change] in fault for fault in found), found


@pytest.mark.parametrize(
    ("change", "parameter"), [(wrong_shape, "mlp.down_proj.weight"), (no_map, "draft_id_to_target_id")]
)
def test_vllms_own_model_has_the_fault_too(change: Change, parameter: str, answers: dict[str, Any]) -> None:
    """What our table of shapes says is no more than what the model that serves it says."""
    (unset,) = answers[change.__name__]["unset"]
    assert unset.endswith(parameter)
