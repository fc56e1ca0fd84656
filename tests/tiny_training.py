"""A run of 04's Trainer that takes a second: random verifier, rows and states of one seed, float32.

`python -m tests.tiny_training DATA OUT BATCH` makes the run of `DAYS`, killed as it takes up that batch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from common import atomic_io, dataset, drafter, head_flags, processes
from common.draft_vocab import DraftVocab
from common.hidden_states import HiddenStateStore
from common.loaders import HeldOut, TrainingRows
from common.training import Outcome, Settings, Trainer
from common.verifier import Verifier

V, H, D, K = 300, 64, 100, 3
SETTINGS = Settings(
    lr=1e-2,
    epochs=2,
    max_steps=None,
    ttt_steps=K,
    optimizer="adamw",
    weight_decay=0.01,
    scheduler="cosine",
    warmup_ratio=0.0,
    save_every=100,
    keep_last=9,
    max_bad_steps=0,
    report_to="none",
)
# As long as a resumed run has to be: accumulated steps, an anchor, checkpoints inside of an epoch.
DAYS = replace(SETTINGS, gradient_accumulation_steps=2, save_every=2, anchor=10.0, scheduler="linear")


def make(folder: Path, lengths: list[int], supervised: float = 0.6) -> Path:
    """A verifier and rows with their states, all random, in `folder`.

    Args:
        folder: gets verifier/, dataset/ and hidden_states/.
        lengths: tokens of each row.
        supervised: share of each row, at its end.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=96, **sizes)
    verifier = LlamaForCausalLM(config)
    # As peaked as a trained one: logits of the size of 8 instead of 0.2.
    verifier.lm_head.weight.data.normal_(0, 1)
    verifier.save_pretrained(folder / "verifier")
    rows: list[dataset.TrainingRow] = []
    (folder / "hidden_states").mkdir()
    for number, length in enumerate(lengths):
        ids, first = torch.randint(0, V, (length,)), round(length * (1 - supervised))
        mask = [int(position >= first) for position in range(length)]
        name = {"id": f"{number:04d}#0", "source": "ab"[number % 2]}
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": length, **name})
        save_file(
            {"hidden_states": torch.randn(length, 4, H).bfloat16(), "token_ids": ids},
            folder / "hidden_states" / f"hs_{number}.safetensors",
        )
    dataset.write(folder / "dataset", rows)
    return folder


def trainer(data: Path, out: Path, settings: Settings, *, total_seq_len: int = 64) -> Trainer:
    """The Trainer of a drafter with random weights on `make`'s rows, a tenth of which is held out."""
    torch.manual_seed(1)
    verifier = Verifier(str(data / "verifier"))
    parser = argparse.ArgumentParser()
    head_flags.add_layer_arguments(parser)
    layer = drafter.transformer_of(verifier, parser.parse_args([]))
    config = drafter.new_config(
        layer, verifier, layer_ids=[0, 1, 2], draft_vocab_size=D, speculative_tokens=K
    )
    model = drafter.build(config, DraftVocab(np.arange(D, dtype=np.int64), V), verifier)
    store = HiddenStateStore(data / "hidden_states", H)
    rows = TrainingRows.open(data / "dataset", store, [], total_seq_len, eval_ratio=0.1)
    train, held_out = rows.loaders(total_seq_len=total_seq_len, dtype=torch.float32, num_workers=0, seed=0)
    measure = HeldOut(rows, held_out, verifier, K)
    return Trainer(model, settings, out, train, measure, dtype=torch.float32)


def run(data: Path, out: Path, settings: Settings, **shape: int) -> Outcome:
    """Train to the end; the start's acceptance is not of interest here."""
    return trainer(data, out, settings, **shape).run({})


def steps(out: Path) -> list[dict[str, Any]]:
    """The metrics of each training step."""
    return [row["train"] for row in atomic_io.read_json_lines(out / "metrics.jsonl") if "train" in row]


class DyingLoader:
    """A loader in whose hands the process is killed, as it takes up one of its batches."""

    def __init__(self, loader: Any, at: int) -> None:
        self.batch_sampler, self._loader, self._at = loader.batch_sampler, loader, at

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if not self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._at -= 1
            yield batch


if __name__ == "__main__":
    processes.start("cpu")
    killed = trainer(Path(sys.argv[1]), Path(sys.argv[2]), DAYS)
    killed.train_loader = DyingLoader(killed.train_loader, int(sys.argv[3]))  # type: ignore[assignment]
    killed.run({})
