"""The key tables: each family's names, both ways, and what is no EAGLE-3 head by its name."""

from __future__ import annotations

import pytest

from common import layouts
from common.errors import InputError

IN_LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
)
# What speculators' Eagle3DraftModel calls the tensors of a one-layer head.
OURS = [
    *(f"layers.0.{name}" for name in IN_LAYER),
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
]
# The same head as each family saves it, in the same order, written down by hand.
FAMILIES = {
    "specforge": [
        *(f"midlayer.{name}" for name in IN_LAYER),
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    ],
    "speculators": OURS,
    "modelopt": [
        *(f"eagle_module.layers.0.{name}" for name in IN_LAYER),
        "eagle_module.fc.weight",
        "eagle_module.norm.weight",
        "eagle_module.lm_head.weight",
        "eagle_module.d2t",
        "eagle_module.t2d",
    ],
    "automodel": [
        *(f"model.layers.0.{name}" for name in IN_LAYER),
        "model.fc.weight",
        "model.norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_s_names_become_ours_and_come_back(family: str) -> None:
    layout, renamed = layouts.recognise(FAMILIES[family])
    assert layout.name == family
    assert renamed == dict(zip(FAMILIES[family], OURS, strict=True))
    assert [layout.theirs(name) for name in OURS] == FAMILIES[family]


def test_modelopt_s_other_prefix_and_its_bare_head_are_known() -> None:
    keys = [key.replace("eagle_module.", "draft_model.") for key in FAMILIES["modelopt"]]
    assert layouts.recognise(keys)[1] == dict(zip(keys, OURS, strict=True))
    bare = [key.removeprefix("eagle_module.") if "layers" not in key else key for key in FAMILIES["modelopt"]]
    assert bare[-3:] == ["lm_head.weight", "d2t", "t2d"]
    keys = [*FAMILIES["modelopt"][:12], *bare[-3:]]
    assert layouts.recognise(keys)[1] == dict(zip(keys, OURS, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_data_parallel_wrapper_is_taken_off(family: str) -> None:
    keys = [f"module.{key}" for key in FAMILIES[family]]
    layout, renamed = layouts.recognise(keys)
    assert layout.name == family
    assert list(renamed.values()) == OURS


def test_the_order_of_the_keys_does_not_matter() -> None:
    keys = FAMILIES["automodel"]
    assert layouts.recognise(reversed(keys))[1] == layouts.recognise(keys)[1]


def test_biases_qk_norms_and_the_norms_of_the_states_have_a_place() -> None:
    extra = {
        "midlayer.self_attn.q_proj.bias": "layers.0.self_attn.q_proj.bias",
        "midlayer.self_attn.q_norm.weight": "layers.0.self_attn.q_norm.weight",
        "midlayer.mlp.down_proj.bias": "layers.0.mlp.down_proj.bias",
        "embed_tokens.weight": "embed_tokens.weight",
        "input_norm.weight": "input_norm.weight",
        "fc_norm.0.weight": "fc_norm.0.weight",
        "fc_norm.2.weight": "fc_norm.2.weight",
    }
    renamed = layouts.recognise([*FAMILIES["specforge"], *extra])[1]
    assert {key: renamed[key] for key in extra} == extra


def test_a_second_layer_keeps_its_number() -> None:
    keys = [*FAMILIES["speculators"], *(f"layers.1.{name}" for name in IN_LAYER)]
    layout, renamed = layouts.recognise(keys)
    assert renamed["layers.1.mlp.up_proj.weight"] == "layers.1.mlp.up_proj.weight"
    assert layout.theirs("layers.11.mlp.up_proj.weight") == "layers.11.mlp.up_proj.weight"
    with pytest.raises(KeyError):
        layouts.SPECFORGE.theirs("layers.1.mlp.up_proj.weight")


def test_what_is_recomputed_or_the_verifier_s_is_left_out_on_purpose() -> None:
    derived = ["midlayer.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "verifier_lm_head.weight"]
    renamed = layouts.recognise([*FAMILIES["specforge"], *derived, "verifier_norm.weight"])[1]
    assert [renamed[key] for key in derived] == [None, None, None]
    assert renamed["verifier_norm.weight"] is None


def test_an_unknown_key_stops_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError) as refused:
        layouts.recognise([*FAMILIES["specforge"], "midlayer.mlp.gate_projection.weight"])
    assert "'midlayer.mlp.gate_projection.weight' is in no layout table" in str(refused.value)
    assert "the other keys look like specforge" in str(refused.value)
    assert "'midlayer.mlp.gate_proj.weight'" in str(refused.value)
    assert "1 of 16 keys are unknown" in str(refused.value)


def test_a_mixture_of_two_families_is_refused() -> None:
    with pytest.raises(InputError, match="is in no layout table"):
        layouts.recognise([*FAMILIES["specforge"], "model.layers.0.mlp.up_proj.weight"])


def test_two_keys_for_one_tensor_are_refused() -> None:
    with pytest.raises(InputError, match=r"eagle_module.d2t and d2t both mean d2t|d2t and eagle_module.d2t"):
        layouts.recognise([*FAMILIES["modelopt"], "d2t"])
    with pytest.raises(InputError, match=r"both mean fc.weight"):
        layouts.recognise([*FAMILIES["specforge"], "module.fc.weight"])


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("layers.0.self_attn.q_a_proj.weight", "an MLA head"),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "an MLA head"),
        ("midlayer.mlp.up_proj.weight_scale", "a quantised head"),
        ("midlayer.mlp.up_proj.weight_packed", "a quantised head"),
        ("midlayer.mlp.up_proj.qweight", "a quantised head"),
        ("midlayer.mlp.up_proj.weight_scale_inv", "a quantised head"),
        ("medusa_head.0.0.linear.weight", "a Medusa head"),
        ("0.0.linear.weight", "a Medusa head"),
        ("model.layers.61.eh_proj.weight", "an MTP layer"),
        ("mtp.layers.0.enorm.weight", "an MTP layer"),
        ("mask_embedding", "a DFlash or other parallel drafter"),
        ("hidden_norm.weight", "a DFlash or other parallel drafter"),
    ],
)
def test_another_kind_of_drafter_is_refused_by_its_name(key: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        layouts.recognise([*FAMILIES["speculators"], key])
    assert str(refused.value).startswith(f"this is {what} (tensor '{key}'), not an EAGLE-3 head: ")


def test_an_eagle_1_head_is_refused_by_its_name() -> None:
    keys = [f"layers.0.{name}" for name in IN_LAYER if name != "hidden_norm.weight"]
    with pytest.raises(InputError, match=r"an EAGLE-1/2 head .*one hidden state and not three"):
        layouts.recognise([*keys, "fc.weight", "fc.bias", "embed_tokens.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_s_own_names_look_foreign(family: str) -> None:
    layouts.refuse_foreign(FAMILIES[family])
