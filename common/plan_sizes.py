"""The sizes that `04 --plan` counts with: from what files this machine has, from flags, from --assume."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import atomic_io, manifest
from common.errors import InputError

# What --assume may name, and the file that tells it better.
ASSUMABLE = {
    "hidden-size": "H, of the verifier",
    "vocab-size": "V, of the verifier",
    "draft-vocab-size": "D, 02's --draft-vocab-size",
    "intermediate-size": "I, of the drafter's MLP",
    "num-heads": "attention heads of the drafter",
    "num-kv-heads": "key and value heads of the drafter",
    "head-dim": "size of a head",
    "rows": "rows of dataset/",
    "row-tokens": "mean tokens of a row",
    "gpus": "processes of torchrun, on one machine",
}
HEAD_KEYS = {
    "hidden-size": "hidden_size",
    "vocab-size": "vocab_size",
    "intermediate-size": "intermediate_size",
    "num-heads": "num_attention_heads",
    "num-kv-heads": "num_key_value_heads",
    "head-dim": "head_dim",
}


@dataclass(frozen=True)
class Sizes:
    """What decides a run's numbers, by the names of `ASSUMABLE`."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    row_tokens: int
    gpus: int = 1

    @property
    def attention(self) -> int:
        """Q, width of all heads together."""
        return self.num_heads * self.head_dim


def assumption(text: str) -> str:
    """argparse type of --assume: `NAME=NUMBER`, the name out of `ASSUMABLE`."""
    name, _, number = text.partition("=")
    try:
        value = float(number.replace("_", ""))
    except ValueError:
        value = math.nan
    if name not in ASSUMABLE or not value > 0:
        raise argparse.ArgumentTypeError(
            f"expected NAME=NUMBER above 0 with a name out of {', '.join(ASSUMABLE)}; found {text}"
        )
    return text


def gather(args: argparse.Namespace) -> tuple[Sizes, dict[str, str], dict[str, Any]]:
    """What files, flags and --assume tell, in this order.

    Args:
        args: of 04.

    Returns:
        The sizes, where each is from, and the head's config.json, empty without one on this machine.

    Raises:
        InputError: names every number that nothing tells.
    """
    head = _head(args.finetune_from)
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    for origin, told in _sources(args, head):
        for name, value in told.items():
            if value is not None and name not in values:
                values[name], origins[name] = int(value), origin
    if args.draft_vocab == "full" and "vocab-size" in values:
        values["draft-vocab-size"] = values["vocab-size"]
        origins["draft-vocab-size"] = "--draft-vocab full"
    missing = [name for name in ASSUMABLE if name not in values and name != "gpus"]
    if missing:
        folder = args.data_from or args.run_dir
        raise InputError(
            f"--plan does not know: {', '.join(f'{name} ({ASSUMABLE[name]})' for name in missing)}. "
            f"Looked into {folder}, into config.json of --finetune-from and of --verifier on this "
            f"machine, and at the flags. Pass --assume {' '.join(f'{name}=N' for name in missing)}."
        )
    sizes = Sizes(**{name.replace("-", "_"): value for name, value in values.items()})
    return sizes, origins, head


def _sources(args: argparse.Namespace, head: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = args.data_from or args.run_dir
    if (folder / "dataset" / manifest.NAME).exists():
        from common import dataset

        lengths = dataset.load(folder / "dataset").with_format(None)["seq_len"]
        yield f"{folder}/dataset", {"rows": len(lengths), "row-tokens": round(sum(lengths) / len(lengths))}
    if args.draft_vocab == "rebuild" and (folder / "vocab" / "d2t.npy").exists():
        from common.draft_vocab import DraftVocab

        yield f"{folder}/vocab", {"draft-vocab-size": len(DraftVocab.load(folder / "vocab"))}
    if head:
        told = {name: head.get(key) for name, key in HEAD_KEYS.items()}
        if args.draft_vocab == "checkpoint":
            told["draft-vocab-size"] = head.get("draft_vocab_size") or head.get("vocab_size")
        yield f"{args.finetune_from}/config.json", told
    flags = ("num-heads", "num-kv-heads", "head-dim", "intermediate-size")
    yield "flag or config file", {name: getattr(args, name.replace("-", "_")) for name in flags}
    config = _verifier_config(args)
    if config:
        told = {name: config.get(HEAD_KEYS[name]) for name in ("hidden-size", "vocab-size")}
        if not args.finetune_from and not config.get("kv_lora_rank"):
            told |= {name: config.get(key) for name, key in HEAD_KEYS.items()}
            told["head-dim"] = (
                config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            )
            told["num-kv-heads"] = config.get("num_key_value_heads") or told["num-heads"]
        yield f"config.json of {args.verifier}", told
    told = dict(text.split("=") for text in args.assume)
    yield "--assume", {name: float(number.replace("_", "")) for name, number in told.items()}


def _head(finetune_from: str | None) -> dict[str, Any]:
    """The head's config.json where it is a folder of this machine; nothing is fetched for a plan."""
    path = Path(finetune_from or "") / "config.json"
    if not finetune_from or not path.exists():
        return {}
    from common import head_config

    return head_config.flatten(atomic_io.read_json(path))


def _verifier_config(args: argparse.Namespace) -> dict[str, Any]:
    """The language model's config.json out of a folder or of the hub's cache; its code is not run."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = args.verifier
    if name is None:
        return {}
    path: Any = Path(name) / "config.json"
    if not path.exists():
        try:
            path = try_to_load_from_cache(name, "config.json", revision=args.revision)
        except HFValidationError:
            return {}
    if not isinstance(path, str | Path):
        return {}
    raw = json.loads(Path(path).read_text())
    return raw.get("text_config", raw)
