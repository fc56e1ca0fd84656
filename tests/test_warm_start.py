"""--finetune-from: every dialect of one trained head computes what the head computes, or is refused."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel

from common import drafter, step0, warm_start
from common.acceptance import Acceptance, count_accepted, measure_offline, verifier_choices
from common.checkpoint import Checkpoint, StoredTensor
from common.draft_vocab import DraftVocab
from common.errors import InputError, StageError
from common.verifier import Verifier
from tests import dialects, reference_head
from tests.conftest import load_script
from tests.dialects import DIALECTS, Config, Tensors, Writer

LAYER_IDS = [2, 15, 27]
MEASURED_ROWS = 16  # some 1,500 drafts
FLAGS = argparse.Namespace(
    finetune_from="",
    finetune_revision=None,
    draft_vocab="checkpoint",
    embedding="checkpoint",
    init_missing=False,
    head_layer_ids=None,
    num_heads=None,
    num_kv_heads=None,
    head_dim=None,
    intermediate_size=None,
    rope_theta=None,
    rms_norm_eps=None,
    max_position_embeddings=None,
)
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def verifier(verifier_dir: Path) -> Verifier:
    return Verifier(str(verifier_dir))


@pytest.fixture(scope="module")
def source(midlayer_head: Path) -> tuple[Tensors, Config]:
    return dialects.read_source(midlayer_head)


@pytest.fixture(scope="module")
def rows(captured_run: Path) -> list[Row]:
    """(token ids [T], states [T, 4, H], loss mask [T]) of each captured row."""
    from common import dataset

    found = []
    for number, row in enumerate(dataset.load(captured_run / "dataset")):
        stored = load_file(captured_run / "hidden_states" / f"hs_{number}.safetensors")
        found.append((stored["token_ids"], stored["hidden_states"].float(), row["loss_mask"]))
    return found


def batch_of(row: Row) -> dict[str, torch.Tensor]:
    """One row as speculators feeds it: position t sees the states of t and the token t + 1."""
    ids, states, mask = row
    length = len(ids) - 1
    return {
        "hidden_states": states[:-1, :3].flatten(1)[None],
        "input_ids": ids[1:][None],
        "verifier_last_hidden_states": states[1:, 3][None],
        "loss_mask": mask[1:][None],
        "document_ids": torch.zeros(1, length, dtype=torch.long),
        "position_ids": torch.arange(1, length + 1)[None],
    }


@pytest.fixture(scope="module")
def measure(
    rows: list[Row], verifier: Verifier, own: Eagle3DraftModel
) -> Callable[[Eagle3DraftModel], Acceptance]:
    """Acceptance on the first rows; what the verifier prefers there is computed once."""
    batches = [batch_of(row) for row in rows[:MEASURED_ROWS]]
    lm_head = verifier.tensor("lm_head").float()
    choices = [verifier_choices(own, batch, lm_head) for batch in batches]

    def measure(model: Eagle3DraftModel) -> Acceptance:
        counts = [count_accepted(model, batch, c, 3) for batch, c in zip(batches, choices, strict=True)]
        drafts, *accepted = torch.cat(counts).sum(0).tolist()
        return Acceptance(drafts, tuple(accepted))

    return measure


@pytest.fixture(scope="module")
def own(midlayer_head: Path, verifier: Verifier) -> Eagle3DraftModel:
    """The head under its own map."""
    return imported(midlayer_head, verifier)[0]


@pytest.fixture(scope="module")
def own_acceptance(
    public_head: Path, own: Eagle3DraftModel, measure: Callable[[Eagle3DraftModel], Acceptance]
) -> Acceptance:
    """Of a trained head only."""
    return measure(own)


def imported(
    path: Path, verifier: Verifier, rebuilt: DraftVocab | None = None, **flags: Any
) -> tuple[Eagle3DraftModel, warm_start.Plan]:
    args = argparse.Namespace(**{**vars(FLAGS), "finetune_from": str(path), **flags})
    plan = warm_start.open_plan(args, verifier, layer_ids=LAYER_IDS, rebuilt=rebuilt, speculative_tokens=3)
    return warm_start.load(plan, verifier), plan


def logits_of(model: Eagle3DraftModel, row: Row) -> torch.Tensor:
    """[T - 1, D] of the first step."""
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    batch = {k: v for k, v in batch_of(row).items() if k not in ("verifier_last_hidden_states", "loss_mask")}
    with torch.no_grad():
        model(**batch, ttt_steps=1)
    hook.remove()
    return seen[0]


def half_shared(own_vocab: DraftVocab, rows: list[Row]) -> DraftVocab:
    """A map sharing half of its tokens with the head's: the most frequent ones, and as many strangers."""
    counts = np.zeros(own_vocab.vocab_size, dtype=np.int64)
    for ids, _, mask in rows:
        counts += np.bincount(ids[mask.bool()].numpy(), minlength=len(counts))
    half = len(own_vocab) // 2
    by_count = own_vocab.token_ids[np.argsort(-counts[own_vocab.token_ids], kind="stable")]
    strangers = np.setdiff1d(np.arange(own_vocab.vocab_size), own_vocab.token_ids)
    strangers = strangers[np.argsort(-counts[strangers], kind="stable")][: len(own_vocab) - half]
    return DraftVocab(np.sort(np.concatenate([by_count[:half], strangers])), own_vocab.vocab_size)


# ----------------------------------------------------------------------------------------------------------
# Every dialect


def test_the_import_computes_what_a_plain_reading_of_the_file_computes(
    own: Eagle3DraftModel, source: tuple[Tensors, Config], verifier: Verifier, rows: list[Row]
) -> None:
    ids, states, _ = rows[0]
    embedding = verifier.tensor("embed_tokens")
    expected = reference_head.first_step_logits(source[0], embedding, ids, states)
    torch.testing.assert_close(logits_of(own, rows[0]), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("write", DIALECTS, ids=lambda writer: writer.__name__)
def test_every_dialect_gives_the_logits_of_the_source(
    write: Writer,
    tmp_path: Path,
    source: tuple[Tensors, Config],
    own: Eagle3DraftModel,
    verifier: Verifier,
    rows: list[Row],
) -> None:
    write(tmp_path / "head", *source, verifier.tensor("embed_tokens"))
    model, plan = imported(tmp_path / "head", verifier)
    assert plan.layout == DIALECTS[write]
    found = logits_of(model, rows[0])
    if plan.vocab.is_full:
        found = found[:, dialects.tokens_of(source[0])]
    assert (found - logits_of(own, rows[0])).abs().max() <= 1e-5 * found.abs().max()


def test_files_of_the_trainer_are_ignored_with_a_line(
    tmp_path: Path, source: tuple[Tensors, Config], verifier: Verifier, caplog: pytest.LogCaptureFixture
) -> None:
    dialects.safeailab_bin(tmp_path / "head", *source, verifier.tensor("embed_tokens"))
    with caplog.at_level(logging.INFO, "stage"):
        _, plan = imported(tmp_path / "head", verifier)
    assert plan.checkpoint.ignored == ("training_state.pt",)
    assert "training_state.pt" in caplog.text


def test_the_table_accounts_for_every_tensor(midlayer_head: Path, verifier: Verifier) -> None:
    model, plan = imported(midlayer_head, verifier)
    report = plan.report()
    assert report["layout"] == "specforge"
    assert report["draft_vocab"] == {"kept": 4096, "new": 0, "dropped": 0}
    status = {line["name"]: line["status"] for line in report["tensors"]}
    assert status.keys() == model.state_dict().keys() - {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert status["embed_tokens.weight"] == "filled from verifier"
    assert {status[name] for name in status if name.startswith("layers.0.")} == {"transferred"}
    sources = {line["name"]: line["source"] for line in report["tensors"]}
    assert sources["layers.0.hidden_norm.weight"] == "midlayer.hidden_norm.weight"


# ----------------------------------------------------------------------------------------------------------
# Another draft vocabulary


def test_a_rebuilt_map_of_half_the_tokens_keeps_99_percent_of_the_acceptance(
    midlayer_head: Path,
    verifier: Verifier,
    rows: list[Row],
    own: Eagle3DraftModel,
    own_acceptance: Acceptance,
    measure: Callable[[Eagle3DraftModel], Acceptance],
) -> None:
    own_vocab = warm_start.read_own_vocab(str(midlayer_head), verifier, flag="--compare-to").vocab
    rebuilt = half_shared(own_vocab, rows)
    model, plan = imported(midlayer_head, verifier, rebuilt, draft_vocab="rebuild")
    assert plan.move.counts() == {"kept": 2048, "new": 2048, "dropped": 2048}
    assert measure(model).length >= 0.99 * own_acceptance.length
    kept_old = np.searchsorted(own_vocab.token_ids, plan.move.kept)
    kept_new = np.searchsorted(rebuilt.token_ids, plan.move.kept)
    assert torch.equal(model.lm_head.weight[kept_new], own.lm_head.weight[kept_old])


def test_the_full_vocabulary_keeps_the_acceptance(
    midlayer_head: Path,
    verifier: Verifier,
    own_acceptance: Acceptance,
    measure: Callable[[Eagle3DraftModel], Acceptance],
) -> None:
    model, plan = imported(midlayer_head, verifier, draft_vocab="full")
    assert plan.config.draft_vocab_size == 49152
    assert model.d2t is None
    assert measure(model).length >= 0.99 * own_acceptance.length


# ----------------------------------------------------------------------------------------------------------
# One trap at a time: each is refused, or costs acceptance that the suite can see


def test_the_head_accepts_what_its_card_says(own_acceptance: Acceptance) -> None:
    # ../shared: 0.269 at position 0 in its second domain, 0.335 in its own.
    assert own_acceptance.by_position[0] > 0.2


def trap_rows_not_moved(model: Eagle3DraftModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))


def trap_map_read_as_offsets(model: Eagle3DraftModel) -> None:
    assert model.d2t is not None
    tokens = torch.arange(len(model.d2t)) + model.d2t
    model.d2t.copy_(tokens.clamp(max=model.verifier_vocab_size - 1 - torch.arange(len(tokens))))


def trap_norm_before_residual(model: Eagle3DraftModel) -> None:
    model.layers[0].norm_before_residual = True


def trap_embedding_zero(model: Eagle3DraftModel) -> None:
    torch.nn.init.zeros_(model.embed_tokens.weight)


def trap_rope_theta(model: Eagle3DraftModel) -> None:
    config = model.rotary_emb.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model.rotary_emb = type(model.rotary_emb)(config)


@pytest.mark.parametrize(
    "trap",
    [trap_rows_not_moved, trap_map_read_as_offsets, trap_norm_before_residual, trap_embedding_zero],
    ids=lambda trap: trap.__name__,
)
def test_a_trap_costs_most_of_the_acceptance(
    trap: Callable[[Eagle3DraftModel], None],
    midlayer_head: Path,
    verifier: Verifier,
    own_acceptance: Acceptance,
    measure: Callable[[Eagle3DraftModel], Acceptance],
) -> None:
    model, _ = imported(midlayer_head, verifier)
    trap(model)
    assert measure(model).by_position[0] < 0.5 * own_acceptance.by_position[0]


def test_a_wrong_rope_base_costs_acceptance(
    midlayer_head: Path,
    verifier: Verifier,
    own_acceptance: Acceptance,
    measure: Callable[[Eagle3DraftModel], Acceptance],
) -> None:
    model, _ = imported(midlayer_head, verifier)
    trap_rope_theta(model)
    assert measure(model).length < own_acceptance.length


def test_states_of_layers_one_off_cost_acceptance(
    own: Eagle3DraftModel, rows: list[Row], verifier: Verifier, own_acceptance: Acceptance
) -> None:
    shifted = [batch_of((ids, states[:, [1, 2, 2, 3]], mask)) for ids, states, mask in rows[:MEASURED_ROWS]]
    assert measure_offline(own, shifted, verifier, 3).by_position[0] < 0.75 * own_acceptance.by_position[0]


def test_the_gate_stops_a_head_whose_rows_were_not_moved(
    public_head: Path, verifier: Verifier, measure: Callable[[Eagle3DraftModel], Acceptance]
) -> None:
    model, plan = imported(public_head, verifier)
    trap_rows_not_moved(model)
    with pytest.raises(StageError) as stop:
        step0.require_step0(model, plan, verifier, measure, 0.05, None)
    causes = str(stop.value).splitlines()[1:]
    assert [cause.split(".")[1].split(":")[0].strip() for cause in causes] == [
        "layer ids",
        "rope",
        "norm placement",
        "map",
        "another verifier",
    ]


def test_the_gate_lets_the_head_pass(
    own: Eagle3DraftModel,
    public_head: Path,
    verifier: Verifier,
    measure: Callable[[Eagle3DraftModel], Acceptance],
) -> None:
    _, plan = imported(public_head, verifier)
    assert step0.require_step0(own, plan, verifier, measure, 0.05, None).by_position[0] > 0.2


def test_layers_that_the_user_knows_better_win_over_the_config(
    tmp_path: Path, source: tuple[Tensors, Config], verifier: Verifier
) -> None:
    head = edited(tmp_path / "head", source, {}, eagle_aux_hidden_state_layer_ids=[3, 16, 28])
    with pytest.raises(InputError, match="--head-layer-ids"):
        imported(head, verifier)
    _, plan = imported(head, verifier, head_layer_ids=LAYER_IDS)
    assert plan.config.eagle_aux_hidden_state_layer_ids == [2, 15, 27]


def test_every_imported_master_is_float32_and_finite(own: Eagle3DraftModel) -> None:
    for name, parameter in own.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert torch.isfinite(parameter).all(), name


def test_bfloat16_masters_are_refused_before_the_first_step(midlayer_head: Path, verifier: Verifier) -> None:
    model, _ = imported(midlayer_head, verifier)
    drafter.require_float32(model)
    with pytest.raises(StageError, match=r"lm_head.weight is torch.bfloat16"):
        drafter.require_float32(model.bfloat16())


def test_layer_ids_that_differ_from_the_capture_stop_the_import(
    midlayer_head: Path, verifier: Verifier
) -> None:
    args = argparse.Namespace(**{**vars(FLAGS), "finetune_from": str(midlayer_head)})
    with pytest.raises(InputError, match=r"--layer-ids 2 15 27"):
        warm_start.open_plan(args, verifier, layer_ids=[1, 14, 26], rebuilt=None, speculative_tokens=3)


def test_the_probe_recommends_the_layers_that_the_head_was_trained_on(
    public_head: Path, captured_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, both = ["--run-dir", str(captured_run)], ["2", "3", "15", "16", "27", "28"]
    capture = [*run, "--backend", "transformers", "--probe", "12", "--layer-ids", *both]
    assert load_script("03_capture_hidden").main(capture) == 0
    candidates = ["--probe-layer-ids", "3", "16", "28", "--probe-layer-ids", "2", "15", "27"]
    assert load_script("04_train").main([*run, "--finetune-from", str(public_head), *candidates]) == 0
    assert "recommended: 03_capture_hidden.py --layer-ids 2 15 27" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------
# Refused by name


def edited(
    folder: Path, source: tuple[Tensors, Config], tensors: dict[str, torch.Tensor | None], **config: Any
) -> Path:
    merged = {name: t for name, t in (source[0] | tensors).items() if t is not None}
    dialects.save(folder, merged, source[1] | config)
    return folder


H = 576


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"midlayer.self_attn.q_a_proj.weight": torch.zeros(8, H)}, {}, "an MLA head"),
        ({"midlayer.mlp.up_proj.weight_scale": torch.zeros(1)}, {}, "a quantised head"),
        ({"medusa_head.0.linear.weight": torch.zeros(1)}, {}, "a Medusa head"),
        ({"eh_proj.weight": torch.zeros(1)}, {}, "an MTP layer"),
        ({"mask_embedding": torch.zeros(1)}, {}, "a DFlash or other parallel drafter"),
        ({"fc.weight": torch.zeros(H, 2 * H)}, {}, "an EAGLE-1/2 head"),
        ({"fc.weight": torch.zeros(64, 192)}, {}, "belongs to another verifier"),
        ({"t2d": torch.zeros(32000, dtype=torch.bool)}, {}, "another verifier vocabulary"),
        ({}, {"vocab_size": 32000}, "another verifier vocabulary"),
        ({"d2t": None, "t2d": None}, {}, "no d2t says which"),
        ({"midlayer.hidden_norm.weight": None}, {}, "no layers.0.hidden_norm.weight"),
        ({"midlayer.hidden_nrm.weight": torch.zeros(H)}, {}, "'midlayer.hidden_norm.weight'"),
        ({"lm_head.weight": torch.zeros(4000, H)}, {}, "4000 rows but d2t has 4096 entries"),
        ({"midlayer.mlp.down_proj.weight": torch.zeros(H, H)}, {}, "mixes two heads"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(1536, H, dtype=torch.int8)}, {}, "a quantised head"),
        ({}, {"rope_parameters": {"rope_theta": 1e4}}, "several rope bases"),
        ({}, {"num_hidden_layers": 2}, "--init-missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_imported_right_is_refused_by_name(
    tensors: dict[str, torch.Tensor | None],
    config: Config,
    message: str,
    tmp_path: Path,
    source: tuple[Tensors, Config],
    verifier: Verifier,
) -> None:
    head = edited(tmp_path / "head", source, tensors, **config)
    with pytest.raises(InputError, match=message):
        imported(head, verifier)


def test_a_t2d_that_contradicts_its_d2t_is_refused(
    tmp_path: Path, source: tuple[Tensors, Config], verifier: Verifier
) -> None:
    t2d = source[0]["t2d"].roll(1)
    with pytest.raises(InputError, match="d2t and t2d name different tokens"):
        imported(edited(tmp_path / "head", source, {"t2d": t2d}), verifier)


def test_init_missing_starts_a_second_layer_at_random_and_lists_it(
    tmp_path: Path, source: tuple[Tensors, Config], verifier: Verifier
) -> None:
    head = edited(tmp_path / "head", source, {}, num_hidden_layers=2)
    model, plan = imported(head, verifier, init_missing=True)
    fresh = {line.name for line in plan.lines if line.status == "new"}
    assert len(model.layers) == 2
    assert fresh == {name for name in model.state_dict() if name.startswith("layers.1.")}


def test_an_embedding_of_its_own_is_kept_or_replaced_as_asked(
    tmp_path: Path, source: tuple[Tensors, Config], verifier: Verifier
) -> None:
    other = verifier.tensor("embed_tokens") * 2
    head = edited(tmp_path / "head", source, {"embed_tokens.weight": other})
    assert torch.equal(imported(head, verifier)[0].embed_tokens.weight, other.float())
    replaced = imported(head, verifier, embedding="verifier")[0].embed_tokens.weight
    assert torch.equal(replaced, verifier.tensor("embed_tokens").float())


# ----------------------------------------------------------------------------------------------------------
# Kimi's real shapes, on the meta device

KIMI = {
    "fc.weight": (7168, 21504),
    "midlayer.self_attn.q_proj.weight": (8192, 14336),
    "midlayer.self_attn.k_proj.weight": (8192, 14336),
    "midlayer.self_attn.v_proj.weight": (8192, 14336),
    "midlayer.self_attn.o_proj.weight": (7168, 8192),
    "midlayer.hidden_norm.weight": (7168,),
    "midlayer.input_layernorm.weight": (7168,),
    "midlayer.post_attention_layernorm.weight": (7168,),
    "norm.weight": (7168,),
}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}


def kimi_head(intermediate: int, rows: int, config: Config, **extra: torch.Tensor) -> Checkpoint:
    shapes = KIMI | {
        "midlayer.mlp.gate_proj.weight": (intermediate, 7168),
        "midlayer.mlp.up_proj.weight": (intermediate, 7168),
        "midlayer.mlp.down_proj.weight": (7168, intermediate),
        "lm_head.weight": (rows, 7168),
    }
    tensors = {n: torch.empty(shape, dtype=torch.bfloat16, device="meta") for n, shape in shapes.items()}
    common = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128, "rms_norm_eps": 1e-6}
    stored = {name: StoredTensor.of(t) for name, t in (tensors | extra).items()}
    return Checkpoint("KIMI", stored, {"vocab_size": 163840, "model_type": "llama", **common, **config})


@pytest.fixture
def kimi(tmp_path: Path) -> Verifier:
    """Kimi-K2.5's config as the notes give it: 61 layers, H 7168, V 163840, nested text_config."""
    text = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(text))
    return Verifier(str(tmp_path))


def test_the_aq_medai_head_plans_to_its_real_geometry(kimi: Verifier) -> None:
    ids = torch.arange(32000) * 5
    d2t, t2d = ids - torch.arange(32000), torch.zeros(163840, dtype=torch.bool)
    t2d[ids] = True
    config = {
        "model_type": "kimi_k2",
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 131072,
        "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
    }
    head = kimi_head(18432, 32000, config, d2t=d2t, t2d=t2d)
    plan = warm_start.plan_import(
        head, FLAGS, kimi, layer_ids=[2, 30, 58], rebuilt=None, speculative_tokens=3
    )
    layer = plan.config.transformer_layer_config
    assert (layer.model_type, layer.intermediate_size, layer.num_attention_heads) == ("llama", 18432, 64)
    assert (layer.head_dim, layer.rms_norm_eps, layer.rope_parameters["rope_theta"]) == (128, 1e-6, 1e6)
    assert plan.config.norm_before_residual is False
    # fc, attention, MLP, four norms, lm_head, the verifier's embedding.
    assert plan.parameters == 154_140_672 + 411_041_792 + 396_361_728 + 4 * 7168 + 229_376_000 + 1_174_405_120
    assert plan.saved_bytes == 4_730_707_968


def test_a_full_vocabulary_head_plans_into_32000_rows(kimi: Verifier) -> None:
    embedding = torch.empty(163840, 7168, dtype=torch.bfloat16, device="meta")
    config = {"rope_theta": 50000.0, "rope_scaling": YARN, "max_position_embeddings": 262144}
    head = kimi_head(12288, 163840, config, **{"embed_tokens.weight": embedding})
    rebuilt = DraftVocab(np.arange(32000) * 5, 163840)
    args = argparse.Namespace(**{**vars(FLAGS), "draft_vocab": "rebuild"})
    plan = warm_start.plan_import(
        head, args, kimi, layer_ids=[2, 30, 58], rebuilt=rebuilt, speculative_tokens=3
    )
    assert plan.move.counts() == {"kept": 32000, "new": 0, "dropped": 131840}
    assert plan.config.draft_vocab_size == 32000
    assert plan.head.layer_ids == [2, 30, 58]
    rope = plan.config.transformer_layer_config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 64.0, 50000.0)


# ----------------------------------------------------------------------------------------------------------
# Out again


def test_a_drafter_exported_for_specforge_is_the_head_that_was_imported(
    tmp_path: Path, midlayer_head: Path, verifier: Verifier, own: Eagle3DraftModel
) -> None:
    drafter.save(own, tmp_path / "drafter")
    drafter.export_specforge(tmp_path / "drafter", tmp_path / "out", verifier)
    ours, theirs = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(midlayer_head / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].to(tensor.dtype), tensor), name
