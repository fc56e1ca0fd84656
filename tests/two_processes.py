"""Under torchrun, on a CPU: `tiny_training`'s run by DDP, by FSDP, and one taking up what the other left."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from common import processes
from common.train_checkpoints import StepCheckpointer
from tests.tiny_training import SETTINGS, run, trainer

# Three batches on each process: a step of two and, at the epoch's end, one of one.
STEPS = 2
# Adam makes a step of the rate's size also where a gradient is rounding alone. At this rate such a step stays
# below the tests' tolerance of 1e-5, and the other weights move by 40 times that.
SHARED = replace(SETTINGS, lr=2e-4, epochs=1, gradient_accumulation_steps=2, max_steps=STEPS, anchor=10.0)


def main(data: Path, out: Path) -> None:
    processes.start("cpu")
    sharded = replace(SHARED, fsdp=True)
    run(data, out / "ddp", SHARED)
    run(data, out / "fsdp", sharded)
    for begun, ended in ((SHARED, sharded), (sharded, SHARED)):
        folder = out / ("ddp-fsdp" if ended.fsdp else "fsdp-ddp")
        made = trainer(data, folder, begun)
        made._agree = lambda _, made=made: made.global_step == 1  # type: ignore[method-assign,misc]
        try:
            made.run({})
        except KeyboardInterrupt:
            assert StepCheckpointer(folder).previous_epoch == 1
        assert run(data, folder, ended).steps == STEPS


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
