"""Row 6: a training step of 04 beside the same speculators model in a bare loop, step by step.

    python -m bench.train_step             # two shapes, half a minute each
    python -m bench.train_step --quick     # does it work

Both sides get the same packed batches, each for its own copy of one model: while 04's Trainer waits for its
next batch, the bare loop makes the step that the Trainer has just made, or is about to make. Weights and
states are random, which a step does not notice.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.train import distributed
from speculators.train.optimizers import build_optimizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, get_cosine_schedule_with_warmup

from bench import measure
from common import dataset, processes, training
from common.acceptance import Acceptance
from common.hidden_states import HiddenStateStore
from common.loaders import TrainingRows
from common.training import Settings

_TOKENS = 512  # of a packed batch, the demo's
_ROWS_A_STEP = 2
_THROWN_AWAY = 3  # first steps: memory is allocated, kernels are chosen
_GOAL, _WAIT_GOAL = "<= 1.02", "<= 0.02"


@dataclass(frozen=True)
class Shape:
    """A drafter's shape.

    Attributes:
        name: for the table.
        hidden: H.
        intermediate: I.
        heads: of attention.
        kv_heads: of keys and values.
        head_dim: size of a head.
        vocab: V.
        draft_vocab: D.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int

    def model(self) -> Eagle3DraftModel:
        """A drafter of this shape in float32 with random weights, its lm_head trained."""
        layer = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        layer._attn_implementation = "simple_flex_attention" if torch.cuda.is_available() else "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=self.draft_vocab,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        )
        model = Eagle3DraftModel(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        model.embed_tokens.weight.requires_grad_(False)
        model.verifier_lm_head.weight.requires_grad_(False)
        return model


SHAPES = (
    Shape("SmolLM2's draft shape", 576, 1536, 9, 3, 64, 49_152, 4096),
    # H 7168, I 12288, 64 heads of 128, V 163840, D 32000, each a tenth as far as kernels' multiples allow.
    Shape("Kimi's draft shape cut to a tenth", 720, 1232, 6, 6, 128, 16_384, 3200),
)


class BareLoop:
    """What one would write by hand: forward, backward, clip, step, schedule."""

    def __init__(self, model: Eagle3DraftModel, settings: Settings, steps: int, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        config = training.trainer_config(settings, Path("unused"), steps, dtype)
        self.arguments = config.train_call_kwargs or {}
        self.optimizers = build_optimizers(model, config)
        warm_up = int(steps * settings.warmup_ratio)
        self.schedulers = [get_cosine_schedule_with_warmup(one, warm_up, steps) for one in self.optimizers]

    def step(self, batch: dict[str, Any]) -> float:
        """Make a step and return its seconds."""
        begun = time.perf_counter()
        device = next(self.model.parameters()).device
        inputs = {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            _, loss, _ = self.model(**inputs, **self.arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


@dataclass
class InTurns:
    """04's loader of rows, with the bare loop's step before or after each step of the Trainer.

    Attributes:
        loader: speculators' own, of the trained rows.
        bare: the other side.
        waited: seconds for each batch to be read.
        ours: seconds from handing a batch to the Trainer to its asking for the next one.
        beside: seconds of the bare loop's step.
    """

    loader: DataLoader
    bare: BareLoop
    waited: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    @property
    def batch_sampler(self) -> Any:
        """The Trainer asks it for the order of the rows."""
        return self.loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def kept(self) -> tuple[list[float], list[float], list[float]]:
        """`ours`, `beside` and `waited` of the steps that count.

        The last step ends in a checkpoint, and the Trainer asks for no batch after it.
        """
        kept = slice(_THROWN_AWAY, len(self.ours))
        return self.ours[kept], self.beside[kept], self.waited[kept]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.loader)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.waited.append(time.perf_counter() - begun)
            bare_first = len(self.waited) % 2 == 0
            if bare_first:
                self.beside.append(self.bare.step(batch))
            begun = time.perf_counter()
            yield batch
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ours.append(time.perf_counter() - begun)
            if not bare_first:
                self.beside.append(self.bare.step(batch))


class NothingHeldOut:
    """The Trainer measures at its end; that is no part of a step."""

    rows = None  # only named in errors

    def by_source(self, _: Eagle3DraftModel) -> dict[str, Acceptance]:
        """One draft, nothing accepted."""
        return {"bench": Acceptance(1, (0,))}


def settings_of(steps: int) -> Settings:
    """04's own defaults, for so many steps."""
    parser = import_module("04_train").build_parser()
    flags = ["--lr", "1e-3", "--epochs", "1", "--max-steps", str(steps), "--save-every", str(10**9)]
    return Settings.of(parser.parse_args(flags))


def write_rows(folder: Path, shape: Shape, steps: int, tokens: int) -> TrainingRows:
    """Rows with random tokens and states for so many steps of so many tokens, half of each supervised."""
    count = _ROWS_A_STEP * (steps + 2) + 1
    length = tokens // _ROWS_A_STEP - 6
    draw = torch.Generator().manual_seed(0)
    states = folder / "hidden_states"
    states.mkdir(parents=True)
    rows: list[dataset.TrainingRow] = []
    for number in range(count):
        ids = torch.randint(shape.vocab, (length,), generator=draw)
        drawn = torch.randn(length, 4, shape.hidden, generator=draw).to(torch.bfloat16)
        save_file({"hidden_states": drawn, "token_ids": ids}, states / f"hs_{number}.safetensors")
        mask = [0] * (length // 2) + [1] * (length - length // 2)
        rows.append(
            {
                "input_ids": ids.tolist(),
                "loss_mask": mask,
                "seq_len": length,
                "id": str(number),
                "source": "bench",
            }
        )
    dataset.write(folder / "dataset", rows)
    store = HiddenStateStore(states, shape.hidden)
    return TrainingRows.open(folder / "dataset", store, failed=[], total_seq_len=tokens, eval_ratio=1 / count)


def loader_of(shape: Shape, steps: int, folder: Path, dtype: torch.dtype, tokens: int) -> DataLoader:
    """Packed batches of so many tokens, enough for so many steps, as 04 reads them."""
    rows = write_rows(folder, shape, steps, tokens)
    return rows.loaders(total_seq_len=tokens, dtype=dtype, num_workers=0, seed=0)[0]


def on_device(model: Eagle3DraftModel) -> Eagle3DraftModel:
    """Where speculators' Trainer takes its model."""
    device: Any = distributed.get_local_rank()
    return model.to(device)


def train(model: Eagle3DraftModel, loader: Any, settings: Settings, folder: Path, dtype: torch.dtype) -> None:
    """04's Trainer, without anything to measure at its end."""
    held_out: Any = NothingHeldOut()
    training.Trainer(model, settings, folder / "checkpoints", loader, held_out, dtype=dtype).run({})


def run(shape: Shape, steps: int, folder: Path, dtype: torch.dtype, tokens: int = _TOKENS) -> InTurns:
    """Train for so many steps of so many tokens, both sides in turn."""
    torch.manual_seed(0)
    model = shape.model()
    settings = settings_of(steps)
    loader = loader_of(shape, steps, folder, dtype, tokens)
    turns = InTurns(loader, BareLoop(on_device(copy.deepcopy(model)), settings, steps, dtype))
    train(model, turns, settings, folder, dtype)
    return turns


def main() -> None:
    """Measure both shapes and print the lines."""
    args = measure.begin(measure.parser(__doc__, rows=40, quick=6, rounds=1))
    _, dtype = processes.start("cpu")
    lines = []
    for shape in SHAPES:
        with measure.scratch() as folder:
            turns = run(shape, args.rows, folder, dtype)
        lines += step_lines(shape, *turns.kept())
    notes = [
        f"{_TOKENS} tokens a step, {torch.get_num_threads()} threads, {dtype}, no reading processes; "
        "medians over steps; the ratio is the median of the steps' ratios, in brackets their quartiles.",
    ]
    measure.report(__file__, args, lines, notes)


def step_lines(
    shape: Shape, ours: list[float], beside: list[float], waited: list[float]
) -> list[measure.Line]:
    """The step's seconds beside the bare loop's, and the share of the time that the Trainer waits."""
    mine, theirs, wait = (statistics.median(side) for side in (ours, beside, waited))
    ratios = sorted(mine / theirs for mine, theirs in zip(ours, beside, strict=True))
    quarter = len(ratios) // 4
    ratio = measure.Ratio(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])
    share = sum(waited) / (sum(waited) + sum(ours))
    what = f"a step, {shape.name} (H {shape.hidden}, I {shape.intermediate}, D {shape.draft_vocab})"
    return [
        measure.Line(6, what, f"{1000 * mine:.1f} ms", f"bare loop {1000 * theirs:.1f} ms", ratio, _GOAL),
        measure.Line(
            *(6, f"loader wait, {shape.name}", f"{1000 * wait:.1f} ms", f"a step {1000 * mine:.1f} ms"),
            *(measure.Ratio(share, share, share), _WAIT_GOAL),
        ),
    ]


if __name__ == "__main__":
    main()
