"""The verifier, read part by part: the right tensor of any folder, or the part's name in the error."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common import verifier
from common.errors import InputError
from common.verifier import Verifier

H, V, N = 8, 20, 6
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": 16,
    "num_hidden_layers": N,
    "num_attention_heads": 2,
    "vocab_size": V,
    "eos_token_id": 5,
}
# Kimi-K2.5's outer config, as its repository has it, and its language model's names.
KIMI = {
    "model_type": "kimi_k25",
    "text_config": {
        **{key: value for key, value in LLAMA.items() if key != "architectures"},
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
    },
}
MISSING_MODEL = "nobody/no-such-model"


def names(prefix: str = "") -> dict[str, torch.Tensor]:
    """The three tensors under `prefix`, each with values of its own."""
    return {
        f"{prefix}model.embed_tokens.weight": torch.full((V, H), 1.0, dtype=torch.bfloat16),
        f"{prefix}lm_head.weight": torch.full((V, H), 2.0, dtype=torch.bfloat16),
        f"{prefix}model.norm.weight": torch.full((H,), 3.0, dtype=torch.bfloat16),
    }


def write(folder: Path, config: dict, *shards: dict[str, torch.Tensor]) -> Verifier:
    """A verifier's folder: one file, or shards with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
    elif shards:
        weight_map = {}
        for number, shard in enumerate(shards):
            file = f"model-{number}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Verifier(str(folder))


def values(model: Verifier) -> list[float]:
    return [float(model.tensor(name).flatten()[0]) for name in ("embed_tokens", "lm_head", "norm")]


# ----------------------------------------------------------------------------------------------------------
# Tensors


def test_the_demo_s_verifier_has_its_known_shape_and_a_tied_head(verifier_dir: Path) -> None:
    model = Verifier(str(verifier_dir))
    assert (model.hidden_size, model.vocab_size, model.num_layers) == (576, 49152, 30)
    assert model.default_layer_ids == [2, 15, 27]
    assert model.tensor("embed_tokens").dtype == torch.bfloat16
    assert tuple(model.tensor("embed_tokens").shape) == (49152, 576)
    assert torch.equal(model.tensor("lm_head"), model.tensor("embed_tokens"))
    assert tuple(model.tensor("norm").shape) == (576,)


def test_an_untied_folder_gives_each_tensor_in_its_stored_dtype(tmp_path: Path) -> None:
    model = write(tmp_path, LLAMA, names())
    assert values(model) == [1.0, 2.0, 3.0]
    assert model.tensor("lm_head").dtype == torch.bfloat16


def test_a_kimi_like_folder_nests_config_and_tensors_below_language_model(tmp_path: Path) -> None:
    vision = {"vision_tower.encoder.norm.weight": torch.zeros(3), "mm_projector.norm.weight": torch.zeros(3)}
    layers = {"language_model.model.layers.0.input_layernorm.weight": torch.zeros(H)}
    model = write(tmp_path, KIMI, vision | layers, names("language_model."))
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (H, 61, V)
    assert model.default_layer_ids == [2, 30, 58]
    assert values(model) == [1.0, 2.0, 3.0]


def test_names_that_put_the_language_model_below_model_are_found(tmp_path: Path) -> None:
    tensors = {
        "model.language_model.embed_tokens.weight": torch.full((V, H), 1.0),
        "lm_head.weight": torch.full((V, H), 2.0),
        "model.language_model.norm.weight": torch.full((H,), 3.0),
        "model.visual.merger.norm.weight": torch.zeros(3),
    }
    assert values(write(tmp_path, LLAMA, tensors)) == [1.0, 2.0, 3.0]


def test_the_embedding_of_a_prediction_layer_is_not_taken_for_the_model_s(tmp_path: Path) -> None:
    prediction = {"model.layers.61.embed_tokens.weight": torch.zeros(V, H)}
    assert values(write(tmp_path, LLAMA, names(), prediction)) == [1.0, 2.0, 3.0]


def test_only_the_shard_that_holds_a_tensor_is_opened(tmp_path: Path) -> None:
    norm = {"model.norm.weight": names()["model.norm.weight"]}
    rest = {key: value for key, value in names().items() if key not in norm}
    model = write(tmp_path, LLAMA, norm, rest)
    (tmp_path / "model-1.safetensors").unlink()
    assert float(model.tensor("norm")[0]) == 3.0
    with pytest.raises(InputError, match=r"model-1.safetensors cannot be had"):
        model.tensor("lm_head")


def test_a_tied_head_is_the_embedding_wherever_the_config_says_so(tmp_path: Path) -> None:
    tensors = {key: value for key, value in names().items() if key != "lm_head.weight"}
    inner = write(tmp_path / "inner", LLAMA | {"tie_word_embeddings": True}, tensors)
    outer = write(tmp_path / "outer", KIMI | {"tie_word_embeddings": True}, tensors)
    assert values(inner) == values(outer) == [1.0, 1.0, 3.0]


def test_an_untied_head_is_never_replaced_by_the_embedding(tmp_path: Path) -> None:
    tensors = {key: value for key, value in names().items() if key != "lm_head.weight"}
    model = write(tmp_path, LLAMA | {"tie_word_embeddings": False}, tensors)
    with pytest.raises(InputError, match=r"no tensor ends in lm_head.weight, and its config does not tie"):
        model.tensor("lm_head")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = write(tmp_path, LLAMA, {"model.embed_tokens.weight": torch.zeros(V, H)})
    with pytest.raises(InputError, match=r"no tensor ends in model.norm.weight or language_model.norm"):
        model.tensor("norm")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(V + 1, H), r"model.embed_tokens.weight is \[21, 8\] torch.float32, expected \[20, 8\]"),
        (torch.zeros(V, H, dtype=torch.int8), r"\[20, 8\] torch.int8, expected .* in floating point"),
    ],
)
def test_a_tensor_of_another_shape_or_packed_is_refused(tmp_path: Path, tensor, message: str) -> None:
    model = write(tmp_path, LLAMA, {"model.embed_tokens.weight": tensor})
    with pytest.raises(InputError, match=message):
        model.tensor("embed_tokens")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"not safetensors at all", "model.safetensors is damaged"),
        ("model.safetensors.index.json", b"{", "index.json is not valid JSON"),
        ("model.safetensors.index.json", b"{}", "index.json has no weight_map"),
        ("model.safetensors.index.json", b"[]", "index.json has no weight_map"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    model = write(tmp_path, LLAMA)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=message):
        model.tensor("norm")


def test_a_folder_without_weights_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.safetensors cannot be had"):
        write(tmp_path, LLAMA).tensor("norm")


# ----------------------------------------------------------------------------------------------------------
# Config


@pytest.mark.parametrize("part", ["config", "tokenizer", "stop_ids", "num_layers"])
def test_a_hub_id_out_of_reach_is_bad_input(part: str) -> None:
    with pytest.raises(InputError, match=rf"--verifier {MISSING_MODEL} \(no such folder, so a hub id\): "):
        getattr(Verifier(MISSING_MODEL), part)


def test_tensors_of_a_hub_id_out_of_reach_are_bad_input() -> None:
    with pytest.raises(InputError, match=rf"--verifier {MISSING_MODEL} .*: model.safetensors cannot be had"):
        Verifier(MISSING_MODEL).tensor("norm")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"model_type": "no-such-model"}',
        '{"model_type": "llama", "hidden_size": "x"}',
    ],
)
def test_a_config_that_cannot_be_read_is_bad_input(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="its config cannot be read"):
        assert Verifier(str(tmp_path)).config


def test_remote_code_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    config = {"model_type": "made_up", "auto_map": {"AutoConfig": "configuration_made_up.MadeUpConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_made_up.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class MadeUpConfig(PretrainedConfig):\n"
        "    model_type = 'made_up'\n"
        "    hidden_size = 77\n"
    )
    with pytest.raises(InputError, match="its config cannot be read"):
        assert Verifier(str(tmp_path)).config
    assert Verifier(str(tmp_path), trust_remote_code=True).hidden_size == 77


def test_remote_code_that_lacks_a_package_is_bad_input(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    auto_map = {"AutoTokenizer": ["tokenization_made_up.MadeUpTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "tokenization_made_up.py").write_text("import a_package_that_nobody_has\n")
    with pytest.raises(InputError, match="a_package_that_nobody_has"):
        assert Verifier(str(tmp_path), trust_remote_code=True).tokenizer


# ----------------------------------------------------------------------------------------------------------
# Tokenizer and facts


def test_special_ids_are_asserted_when_the_tokenizer_loads(verifier_dir: Path) -> None:
    good = Verifier(str(verifier_dir), expected_tokens=("<|im_start|>=1", "<|im_end|>=2"))
    assert good.tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    shifted = Verifier(str(verifier_dir), expected_tokens=("<|im_start|>=1", "<|im_end|>=163586"))
    with pytest.raises(InputError) as refused:
        assert shifted.tokenizer
    assert "gives '<|im_end|>' the id 2, --expect-token 163586. Shifted special ids" in str(refused.value)


def test_an_expected_token_that_the_tokenizer_lacks_is_refused(verifier_dir: Path) -> None:
    with pytest.raises(InputError, match=r"gives '</think>' the id"):
        assert Verifier(str(verifier_dir), expected_tokens=("</think>=163607",)).tokenizer


@pytest.mark.parametrize("expectation", ["<|im_end|>", "=2", "<|im_end|>=two"])
def test_an_expectation_without_text_or_id_is_refused(expectation: str) -> None:
    with pytest.raises(InputError, match="expected TEXT=ID"):
        assert Verifier(MISSING_MODEL, expected_tokens=(expectation,)).tokenizer


def with_tokenizer(folder: Path, generation: dict | None) -> Verifier:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = write(folder, LLAMA)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "<unk>": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return model


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        ({"eos_token_id": [7, 9]}, [2, 7, 9]),
        ({"eos_token_id": 7}, [2, 7]),
        ({"temperature": 0.6, "do_sample": True}, [2, 5]),
        (None, [2, 5]),
    ],
)
def test_answers_stop_at_the_generation_config_s_ids_and_the_tokenizer_s(
    tmp_path: Path, generation: dict | None, ids: list[int]
) -> None:
    # The tokenizer's own end is 2, the config's 5.
    assert with_tokenizer(tmp_path, generation).stop_ids == ids


def test_facts_name_tokenizer_and_template_by_fingerprint(verifier_dir: Path) -> None:
    facts = Verifier(str(verifier_dir), "main").facts()
    assert facts == {
        "verifier": str(verifier_dir),
        "revision": "main",
        "tokenizer": "e6d44ded9564218b",
        "chat_template": "dc126cf0155881b6",
    }


def test_rows_of_another_tokenizer_are_refused(verifier_dir: Path) -> None:
    model = Verifier(str(verifier_dir))
    model.require_tokenizer_of({}, "dataset/")
    model.require_tokenizer_of({"verifier": "elsewhere", "tokenizer": "e6d44ded9564218b"}, "dataset/")
    with pytest.raises(InputError, match=r"dataset/ holds ids of Qwen/Q; .* has another tokenizer"):
        model.require_tokenizer_of({"verifier": "Qwen/Q", "tokenizer": "0000"}, "dataset/")


# ----------------------------------------------------------------------------------------------------------
# Flags


def from_args(*argv: str, **inherited) -> Verifier:
    parser = argparse.ArgumentParser()
    verifier.add_arguments(parser)
    return verifier.from_args(parser.parse_args(argv), inherited)


def test_flags_beat_the_facts_of_the_stage_before() -> None:
    assert from_args(verifier="a", revision="r1") == Verifier("a", "r1")
    assert from_args("--revision", "r2", verifier="a", revision="r1") == Verifier("a", "r2")
    assert from_args("--verifier", "a", verifier="a", revision="r1") == Verifier("a", "r1")
    found = from_args("--verifier", "b", "--trust-remote-code", "--expect-token", "x=1", verifier="a")
    assert found == Verifier("b", None, True, ("x=1",))


def test_another_verifier_does_not_inherit_the_revision() -> None:
    assert from_args("--verifier", "b", verifier="a", revision="r1") == Verifier("b", None)


def test_no_verifier_at_all_is_bad_input() -> None:
    with pytest.raises(InputError, match="pass --verifier with a folder or a hub id"):
        from_args()


@pytest.mark.parametrize("name", ["./models/none", "/models/none", "~/none", "runs/x/none", "models/"])
def test_a_missing_path_is_refused_at_once_and_not_sought_on_the_hub(name: str, monkeypatch) -> None:
    monkeypatch.chdir("/")
    args = argparse.Namespace(verifier=name, revision=None, trust_remote_code=False, expect_token=[])
    with pytest.raises(InputError, match=f"--verifier {name}: no such file or folder"):
        verifier.from_args(args)


def test_a_hub_id_has_no_form_of_a_path() -> None:
    args = argparse.Namespace(verifier=MISSING_MODEL, revision=None, trust_remote_code=False, expect_token=[])
    assert verifier.from_args(args).name == MISSING_MODEL


def test_norms_that_store_their_gain_less_one_are_those_that_speculators_knows() -> None:
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

    assert verifier._NORM_LESS_ONE == GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
