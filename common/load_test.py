"""The finished drafter, loaded by vLLM's own classes: the stage fails here, and not the user's deployment.

`python -m common.load_test REQUEST ANSWER` is the half that imports vLLM. It builds the served model class on
the CPU from `config.json`, as `vllm serve` does, and lets it load the tensors; the verifier's weights are not
read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import atomic_io, log
from common.errors import StageError

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from common.verifier import Verifier

_LOG = log.get("load_test")
_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 480  # the other processes of a torchrun wait ten minutes for this one, on GPUs
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
# Without max_position_embeddings: vLLM puts the verifier's there.
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
_LAYER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "rope_parameters"),
)


def require_loadable(folder: Path, model: Eagle3DraftModel, verifier: Verifier) -> None:
    """Let vLLM read the folder's config and tensors, and hold them against the drafter that was trained.

    Args:
        folder: written by `drafter.save`.
        model: the drafter that was saved there.
        verifier: whose config vLLM reads beside it.

    Raises:
        StageError: a field or a tensor is not what was trained, or vLLM cannot read it.
    """
    if importlib.util.find_spec("vllm") is None:
        _LOG.info("%s: not loaded in vLLM, which is not installed here", folder)
        return
    answer = _ask_vllm(folder, verifier)
    if "unchecked" in answer:
        _LOG.warning(
            "%s: not loaded in vLLM, which does not come to it here: %s", folder, answer["unchecked"]
        )
        return
    found = faults(answer, model)
    if found:
        raise StageError(
            f"{folder} does not load in vLLM {answer['version']} as it was trained: {'; '.join(found)}. "
            "Served, the drafter would fail or accept next to nothing. The checkpoints are whole: once the "
            "cause is mended, the same command writes the drafter again. --no-load-test leaves this out."
        )
    _LOG.info("%s: loads in vLLM %s, %d tensors", folder, answer["version"], len(answer["tensors"]))


def _ask_vllm(folder: Path, verifier: Verifier) -> dict[str, Any]:
    request = {
        "folder": str(folder.resolve()),
        "verifier": verifier.name,
        "revision": verifier.revision,
        "trust_remote_code": verifier.trust_remote_code,
    }
    env = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        ask, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        atomic_io.write_json(ask, request)
        command = [sys.executable, "-m", "common.load_test", str(ask), str(answer)]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"unchecked": f"not done after {_TIMEOUT_S} s"}
        if not answer.exists():
            last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
            return {"unchecked": f"its process ended with code {done.returncode}: {last}"}
        return atomic_io.read_json(answer)


def faults(answer: dict[str, Any], model: Eagle3DraftModel) -> list[str]:
    """What vLLM's answer says against the folder: each field or tensor with what was found and expected."""
    found = [*_wrong_fields(answer, model), *_wrong_tensors(answer, model)]
    return [*found, f"vLLM: {answer['failed']}"] if "failed" in answer else found


def _wrong_fields(answer: dict[str, Any], model: Eagle3DraftModel) -> list[str]:
    found = answer.get("config")
    if found is None:
        return []
    config, layer = model.config, model.config.transformer_layer_config
    ids = "eagle_aux_hidden_state_layer_ids"
    expected = {
        **{name: getattr(config, name) for name in (*_FLAGS, ids)},
        **{name: getattr(layer, name) for name in _LAYER},
    }
    # As JSON has them: what is compared has been through a file.
    expected = json.loads(json.dumps(expected))
    return [
        f"config.json, {name}: vLLM reads {found.get(name)}, trained with {wanted}"
        for name, wanted in expected.items()
        if found.get(name) != wanted
    ]


def _wrong_tensors(answer: dict[str, Any], model: Eagle3DraftModel) -> list[str]:
    expected = {
        name: list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in model._keys_to_ignore_on_save
    }
    stored = answer.get("tensors", {})
    wrong = [
        f"model.safetensors, {name}: found {shape}, expected {expected.get(name, 'no such tensor')}"
        for name, shape in stored.items()
        if expected.get(name) != shape
    ]
    wrong += [
        f"model.safetensors, {name}: missing, expected {shape}"
        for name, shape in expected.items()
        if stored and name not in stored
    ]
    wrong += [f"{name}: {error}" for name, error in answer.get("refused", {}).items()]
    return wrong + [f"vLLM's {name} is set by no tensor" for name in answer.get("unset", [])]


# ----------------------------------------------------------------------------------------------------------
# Inside the process that imports vLLM


def load_in_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Load a drafter as `vllm serve` would, on the CPU.

    Args:
        request: `{folder, verifier, revision, trust_remote_code}`.

    Returns:
        `{version, config, tensors, refused, unset}`: the config as vLLM reads it, name -> shape in the file,
        name -> error of tensors that the model refuses, and parameters that no tensor set; `failed` instead
        where it does not come so far, `unchecked` where vLLM cannot even serve the verifier.
    """
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    served = {
        "model": request["verifier"],
        "revision": request["revision"],
        "trust_remote_code": request["trust_remote_code"],
        "enforce_eager": True,
    }
    answer: dict[str, Any] = {"version": vllm.__version__}
    try:
        # Alone first: a verifier that this machine cannot serve says nothing about the drafter.
        EngineArgs(**served).create_engine_config()
    except Exception as error:
        return answer | {"unchecked": _said(error)}
    speculative = {"method": "eagle3", "model": request["folder"], "num_speculative_tokens": 1}
    try:
        config = EngineArgs(**served, speculative_config=speculative).create_engine_config()
        assert config.speculative_config is not None
        answer["config"] = json.loads(config.speculative_config.draft_model_config.hf_config.to_json_string())
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as scratch:
            return answer | _load_tensors(config, Path(request["folder"]), Path(scratch))
    except Exception as error:
        return answer | {"failed": _said(error)}


def _load_tensors(config: Any, folder: Path, scratch: Path) -> dict[str, Any]:
    """Build the class that serves the drafter, load tensor after tensor, and look for what stayed unset."""
    import torch
    from safetensors.torch import load_file
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{scratch / 'rendezvous'}",
        backend="gloo",
    )
    ensure_model_parallel_initialized(1, 1)
    draft = config.speculative_config.draft_model_config
    served_class, _ = ModelRegistry.resolve_model_cls(draft.architectures, draft)
    with set_default_torch_dtype(draft.dtype), torch.device("cpu"):
        served: Any = served_class(vllm_config=config)
    for parameter in served.parameters():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else -1)
    tensors, refused = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        try:
            served.load_weights(iter([(name, tensor)]))
        except Exception as error:
            refused[name] = _said(error)
    unset = [name for name, parameter in served.named_parameters() if _is_unset(parameter.data)]
    return {
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "refused": refused,
        "unset": unset,
    }


def _is_unset(tensor: torch.Tensor) -> bool:
    import torch

    wrong = torch.isnan(tensor) if tensor.is_floating_point() else torch.lt(tensor, 0)
    return bool(wrong.any())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    atomic_io.write_json(Path(sys.argv[2]), load_in_vllm(atomic_io.read_json(Path(sys.argv[1]))))
