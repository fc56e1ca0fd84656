"""common/training_plan.py: counts of real shapes, the activation formula against counted tensors."""

from __future__ import annotations

import argparse
import json
import weakref
from pathlib import Path

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from common import drafter, manifest, plan_sizes, training
from common.draft_vocab import DraftVocab
from common.errors import InputError
from common.training_plan import Plan
from common.verifier import Verifier
from tests.conftest import ROOT, load_script

# Of the two public Kimi heads, as their config.json has them.
AQ_MEDAI = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
}
LIGHTSEEK = {**AQ_MEDAI, "model_type": "llama", "intermediate_size": 12288, "draft_vocab_size": 163840}
EMBEDDING = 1_174_405_120  # 163840 x 7168
DATA = ("--assume", "rows=25000", "row-tokens=2000", "gpus=8")


def flags(*argv: str | Path) -> argparse.Namespace:
    return load_script("04_train").build_parser().parse_args([str(word) for word in argv])


def head(tmp_path: Path, config: dict[str, object]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "trained", "frozen"),
    [
        # fc 154,140,672 + attention 411,041,792 + MLP 396,361,728 + lm_head 229,376,000 + 4 norms of 7,168;
        # frozen: embedding, the verifier's rows for the loss, its norm.
        (AQ_MEDAI, 1_190_948_864, EMBEDDING + 229_376_000 + 7_168),
        # MLP 264,241,152 and lm_head 1,174,405,120 instead.
        (LIGHTSEEK, 2_003_857_408, EMBEDDING + 1_174_405_120 + 7_168),
    ],
)
def test_kimi_heads_have_their_known_numbers_of_parameters(
    config: dict[str, object], trained: int, frozen: int, tmp_path: Path
) -> None:
    folder = head(tmp_path, config)
    plan = Plan.of(flags("--finetune-from", folder, "--draft-vocab", "checkpoint", *DATA))
    assert (plan.trained, plan.frozen) == (trained, frozen)


def test_without_its_lm_head_the_kimi_head_trains_0_962_billion(tmp_path: Path) -> None:
    folder = head(tmp_path, AQ_MEDAI)
    args = flags("--finetune-from", folder, "--draft-vocab", "checkpoint", "--no-train-lm-head", *DATA)
    assert Plan.of(args).trained == 961_572_864


def test_the_demo_s_counts_are_the_real_model_s(verifier_dir: Path) -> None:
    args = flags("--verifier", verifier_dir, *DATA, "draft-vocab-size=1024")
    plan = Plan.of(args)
    verifier = Verifier(str(verifier_dir))
    config = drafter.new_config(
        drafter.transformer_of(verifier, args),
        verifier,
        layer_ids=[2, 15, 27],
        draft_vocab_size=1024,
        speculative_tokens=3,
    )
    model = drafter.build(config, DraftVocab(torch.arange(1024).numpy(), 49152), verifier)
    real = {
        flag: sum(p.numel() for p in model.parameters() if p.requires_grad is flag) for flag in (True, False)
    }
    assert (plan.trained, plan.frozen) == (real[True], real[False])


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(made):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := tensor.untyped_storage()._cdata) not in self.sizes
            ):
                self.sizes[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.sizes.pop, key, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return made


def fullest_moment(plan: Plan, tokens: int, steps: int) -> int:
    """Bytes alive at the fullest moment of a real forward and backward in bfloat16 autocast."""
    model = Eagle3DraftModel(plan.model.config).float()
    model.t2d[: plan.sizes.draft_vocab_size] = True
    model.lm_head.weight.requires_grad_(True)
    settings = training.Settings.of(flags("--lr", "1e-4", "--ttt-steps", str(steps)))
    kwargs = training.trainer_config(settings, Path("unused"), 1, torch.bfloat16).train_call_kwargs
    states = torch.randn(1, tokens, 4 * plan.sizes.hidden_size, dtype=torch.bfloat16)
    alive = Alive()
    with alive:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(
                hidden_states=states[..., plan.sizes.hidden_size :],
                verifier_last_hidden_states=states[..., : plan.sizes.hidden_size],
                input_ids=torch.zeros(1, tokens, dtype=torch.long),
                document_ids=torch.zeros(1, tokens, dtype=torch.long),
                loss_mask=torch.ones(1, tokens),
                position_ids=torch.arange(1, tokens + 1)[None],
                **kwargs,
            )
        loss.backward()
    return alive.peak


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has other kernels; the plan calls that estimated"
)
def test_the_activation_formula_is_what_a_step_keeps(steps: int) -> None:
    """Its growth from 256 to 512 tokens, as what does not grow (bfloat16 copies) is a line of its own.

    The formula leaves out ids, masks and rotary tables: 312 bytes a token here, whatever H is.
    """
    sizes = ("hidden-size=112", "vocab-size=600", "draft-vocab-size=500", "intermediate-size=224")
    sizes += ("num-heads=4", "num-kv-heads=4", "head-dim=32")
    plan = Plan.of(flags(*DATA, *sizes, "--device", "cpu", "--ttt-steps", str(steps)))
    plan.model.config.transformer_layer_config._attn_implementation = "sdpa"
    counted = fullest_moment(plan, 512, steps) - fullest_moment(plan, 256, steps)
    assert plan.activations_of(512) - plan.activations_of(256) + 256 * 312 == pytest.approx(counted, rel=2e-3)


def test_kimis_activations_at_8192_tokens(tmp_path: Path) -> None:
    plan = Plan.of(flags("--finetune-from", head(tmp_path, AQ_MEDAI), "--draft-vocab", "checkpoint", *DATA))
    # 8192 x (160 x 7168 + 24 x 18432 + 66 x 8192 + 40 x 32000)
    assert plan.activations_of(8192) == 8192 * 3_409_920


def test_the_shipped_config_is_planned_without_head_verifier_run_folder_or_network(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [
        "--config",
        str(ROOT / "configs" / "kimi-k2.5.yaml"),
        "--plan",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert load_script("04_train").main(argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "trained 1,190,948,864" in shown
    assert "moments 9.53GB adamw: 8 B x 1,190,948,864" in shown
    # 25,000 x 2,000 x 57,344 B; 2 x ceil(23,750 x 2,000 / 65,536) steps.
    assert "hidden_states/ 2.87TB" in shown
    assert "steps 1,450 2 epochs x 47,500,000 trained tokens" in shown
    # 1,190,948,864 + the embedding and d2t, t2d; SpecForge's layout leaves the embedding to the verifier.
    assert "drafter/ 4.73GB" in shown
    assert "specforge/ 2.38GB" in shown
    assert "hours" not in shown
    assert "It fits: 74.2GB of 96.0GB (--gpu-memory)." in shown
    assert not (tmp_path / "run").exists()
    more = ["--gpu-memory", "48", "--tokens-per-second", "60000"]
    assert load_script("04_train").main([*argv, *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "hours 0.4 95,000,000 / 60000 tokens/s" in shown
    assert "It does not fit: 74.2GB of 48.0GB (--gpu-memory); --total-seq-len 3072 would." in shown


def test_what_nothing_tells_is_asked_for_by_name(tmp_path: Path) -> None:
    args = flags("--finetune-from", head(tmp_path, AQ_MEDAI), "--run-dir", tmp_path / "none")
    with pytest.raises(InputError, match=r"Pass --assume draft-vocab-size=N rows=N row-tokens=N\."):
        Plan.of(args)


def test_what_files_tell_is_not_assumed(captured_run: Path, verifier_dir: Path) -> None:
    args = flags("--data-from", captured_run, "--verifier", verifier_dir, *DATA, "draft-vocab-size=512")
    plan = Plan.of(args)
    assert (plan.sizes.rows, plan.sizes.hidden_size, plan.sizes.head_dim) == (40, 576, 64)
    assert plan.origins["rows"].endswith("dataset")
    assert plan.origins["draft-vocab-size"] == "--assume"


@pytest.mark.parametrize("text", ["rows", "rows=many", "rows=0", "lines=5"])
def test_an_assumption_is_a_known_name_and_a_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=NUMBER"):
        plan_sizes.assumption(text)


def test_what_the_devices_share_is_divided_and_what_a_run_adds_is_added(tmp_path: Path) -> None:
    folder = head(tmp_path, AQ_MEDAI)
    base = ("--finetune-from", folder, "--draft-vocab", "checkpoint", *DATA)
    trained = 1_190_948_864
    plain = Plan.of(flags(*base)).total
    assert Plan.of(flags(*base, "--anchor", "0.1")).total - plain == 2 * trained
    # An eighth of weights, gradients and moments, and no buckets of DDP; gathered, all weights in bfloat16
    # and the gradients of the trained ones, in float32 where batches are accumulated.
    activations = 1.5 * 4096 * 3_409_920
    everything = trained + EMBEDDING + 32000 * 7168 + 7168
    sharded = (4 * everything + 12 * trained) / 8 + 2 * everything + activations
    assert Plan.of(flags(*base, "--fsdp")).total == pytest.approx(sharded + 2 * trained)
    accumulated = flags(*base, "--fsdp", "--gradient-accumulation-steps", "2")
    assert Plan.of(accumulated).total == pytest.approx(sharded + 4 * trained)
    # Half the steps, each of two batches.
    steps = {line.name: line.value for line in Plan.of(flags(*base, "--epochs", "1")).time()}["steps"]
    twice = flags(*base, "--epochs", "1", "--gradient-accumulation-steps", "2")
    assert (steps, next(iter(Plan.of(twice).time())).value) == ("1,450", "725")


def states(*argv: str | Path) -> tuple[str, str]:
    (line,) = [line for line in Plan.of(flags(*argv)).host() if line.name == "hidden_states/"]
    return line.value, line.formula


def test_the_disk_of_the_states_follows_how_they_are_stored(tmp_path: Path) -> None:
    run = ("--run-dir", tmp_path / "run", "--draft-vocab", "checkpoint", *DATA)
    base = ("--finetune-from", head(tmp_path, AQ_MEDAI), *run)
    # 50 million tokens of 4 x 7168 x 2 B, of 3 x (7168 + 2) + 14336 B and of 4 x (7168 + 2) B; 8 B an id.
    value, formula = states(*base)
    assert value == "2.87TB"
    assert "by 03's --store-dtype mixed 1.79TB, fp8 1.43TB" in formula
    # A twentieth is held out and stays; a quarter of the rest goes with each shard.
    assert states(*base, "--shard", "1/4")[0] == "824GB"
    assert states(*base, "--hidden-states", "online")[0] == "0.00B"
    facts = {"store_dtype": "fp8", "compress": "zstd"}
    manifest.Manifest(stage="03_capture_hidden", config={}, facts=facts).write(tmp_path / "run/hidden_states")
    value, formula = states(*base)
    assert value == "1.43TB"
    assert "before zstd, as 03 stored them (fp8+zstd)" in formula


def test_a_cpu_is_held_against_the_machine_s_memory(tmp_path: Path) -> None:
    base = ("--finetune-from", head(tmp_path, AQ_MEDAI), "--draft-vocab", "checkpoint", *DATA)
    assert "memory of this machine" in Plan.of(flags(*base, "--device", "cpu")).verdict()


def test_loader_memory_ends_at_its_limit(tmp_path: Path) -> None:
    base = ("--finetune-from", head(tmp_path, AQ_MEDAI), "--draft-vocab", "checkpoint", *DATA)
    # 8 processes x 2 loaders x 4 workers x 4 batches x 4096 tokens x 57,344 B
    assert next(iter(Plan.of(flags(*base)).host())).value == "60.1GB"
    assert next(iter(Plan.of(flags(*base, "--loader-memory", "20")).host())).value == "20.0GB"
