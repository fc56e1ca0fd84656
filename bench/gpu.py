"""On a CUDA machine: the training step at Kimi's draft shape, its memory, and what the store's forms cost.

    python -m bench.gpu
    python -m bench.gpu --quick

Without a CUDA device it says so and measures nothing. `--rows` is the number of steps.

* The step: 04's Trainer beside the bare loop of row 6, in turns, bfloat16 autocast over float32 weights, flex
  attention, 4,096 packed tokens.
* Its memory: each side alone for a few steps, the most that PyTorch's allocator held.
* Its share of the card's peak: floating-point operations of a step (`flops`) / seconds / the rate of a square
  bfloat16 product, measured here.
* The store: rows of 2,000 tokens written to and read from the disk of `runs/`, reads end on the device.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from bench import measure, train_step
from bench.measure import Line, Ratio
from bench.train_step import BareLoop, Shape
from common import processes
from common.hidden_states import HiddenStateStore
from common.store_forms import COMPRESSIONS, PRECISIONS, StoreForm

KIMI = Shape("Kimi-K2.5's draft shape", 7168, 18_432, 64, 64, 128, 163_840, 32_000)
_TOKENS = 4096
_MEMORY_STEPS = 4
_STORE_ROWS, _STORE_TOKENS = 8, 2000
_SQUARE = 8192
FORMS = [StoreForm(dtype, compress) for compress in COMPRESSIONS for dtype in PRECISIONS]


def main() -> None:
    """Measure and report, where there is a CUDA device."""
    args = measure.begin(measure.parser(__doc__, rows=20, quick=6, rounds=1))
    if not torch.cuda.is_available():
        print("bench.gpu: no CUDA device is visible, so nothing was measured")
        return
    device, dtype = processes.start("cuda")
    peak = product_rate(device, _SQUARE)
    lines = [*step_lines(KIMI, args.rows, dtype, _TOKENS, peak), *memory_lines(KIMI, dtype, _TOKENS)]
    lines += store_lines(KIMI.hidden, device, _STORE_ROWS, _STORE_TOKENS)
    notes = [
        f"{torch.cuda.get_device_name(device)}, {torch.__version__}, CUDA {torch.version.cuda}",
        f"peak: a product of two {_SQUARE} x {_SQUARE} bfloat16 matrices, {peak / 1e12:.0f} TFLOP/s",
    ]
    measure.report(__file__, args, lines, notes)


def flops(shape: Shape, tokens: int, ttt_steps: int) -> float:
    """Floating-point operations of a training step.

    `K x T x 6 x (layer + head) + T x (4 x fc + 2 x head)`: a product with n weights takes 2n operations a
    token forward and 2n for each of its two gradients. The K passes share fc, whose input needs no gradient,
    and the targets, which are a product with the verifier's head, forward only. Attention's own products are
    left out: at these lengths they are one or two per cent.

    Args:
        shape: of the drafter.
        tokens: T of a packed batch.
        ttt_steps: K.
    """
    attention = shape.head_dim * (2 * (shape.heads + 2 * shape.kv_heads) + shape.heads) * shape.hidden
    layer = attention + 3 * shape.hidden * shape.intermediate
    head = shape.hidden * shape.draft_vocab
    fc = 3 * shape.hidden**2
    return tokens * (6.0 * ttt_steps * (layer + head) + 4 * fc + 2 * head)


def product_rate(device: torch.device, size: int) -> float:
    """Operations a second of a product of two [size, size] bfloat16 matrices; the best of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / min(_seconds(lambda: left @ right, device) for _ in range(10))


def step_lines(shape: Shape, steps: int, dtype: torch.dtype, tokens: int, peak: float) -> list[Line]:
    """Row 6's lines at this shape, steps a second, and the share of the card's peak."""
    with measure.scratch() as folder:
        ours, beside, waited = train_step.run(shape, steps, folder, dtype, tokens).kept()
    work = flops(shape, tokens, train_step.settings_of(steps).ttt_steps)
    shares = [work / seconds / peak for seconds in ours]
    rates = [1 / statistics.median(side) for side in (ours, beside)]
    return [
        *train_step.step_lines(shape, ours, beside, waited),
        Line(
            *("gpu", f"steps of {tokens:,} tokens a second", f"{rates[0]:.3f}", f"bare loop {rates[1]:.3f}"),
            Ratio(rates[0] / rates[1], rates[0] / rates[1], rates[0] / rates[1]),
        ),
        Line(
            *("gpu", "share of the peak", f"{work / 1e12:.1f} TFLOP a step", f"{peak / 1e12:.0f} TFLOP/s"),
            Ratio(statistics.median(shares), min(shares), max(shares)),
        ),
    ]


def memory_lines(shape: Shape, dtype: torch.dtype, tokens: int) -> list[Line]:
    """The most memory that each side takes, alone."""
    settings = train_step.settings_of(_MEMORY_STEPS)
    with measure.scratch() as folder:
        loader = train_step.loader_of(shape, _MEMORY_STEPS, folder, dtype, tokens)

        def ours() -> None:
            train_step.train(shape.model(), loader, settings, folder, dtype)

        def beside() -> None:
            bare = BareLoop(train_step.on_device(shape.model()), settings, _MEMORY_STEPS, dtype)
            for batch, _ in zip(loader, range(_MEMORY_STEPS), strict=False):
                bare.step(batch)

        mine, theirs = peak_bytes(ours), peak_bytes(beside)
    return [
        Line(
            *("gpu", f"peak memory, {tokens:,} tokens a step", f"{mine / 1e9:.2f} GB"),
            *(f"bare loop {theirs / 1e9:.2f} GB", Ratio.of([mine], [theirs])),
        )
    ]


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that PyTorch held on the GPU during some work; without one, what the process holds then."""
    gc.collect()
    if not torch.cuda.is_available():
        work()
        return measure.resident_bytes(os.getpid())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


def store_lines(hidden: int, device: torch.device, rows: int, tokens: int) -> list[Line]:
    """Tokens a second written and read in each form of the store, beside those of plain bfloat16."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, 4, hidden, generator=draw).to(torch.bfloat16)
    rates: dict[str, tuple[float, float]] = {}
    for form in FORMS:
        with measure.scratch() as folder:
            store = HiddenStateStore(folder, hidden, form=form)
            works = partial(write_rows, store, states, rows), partial(read_rows, store, device, rows)
            write, read = (rows * tokens / _seconds(work, device) for work in works)
        rates[str(form)] = write, read
    plain = rates[str(FORMS[0])]
    return [
        Line(
            *("gpu", f"{form}, {work}", f"{rate:,.0f} tokens/s", f"{FORMS[0]} {beside:,.0f} tokens/s"),
            Ratio.of([rate], [beside]),
        )
        for form, found in rates.items()
        for work, rate, beside in zip(("write", "read"), found, plain, strict=True)
    ]


def write_rows(store: HiddenStateStore, states: torch.Tensor, count: int) -> None:
    """The same row under several numbers."""
    for row in range(count):
        store.write(row, torch.arange(len(states)), states)


def read_rows(store: HiddenStateStore, device: torch.device, count: int) -> None:
    """Read every row and bring its states to the device."""
    for row in range(count):
        store.read(row)[1].to(device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
