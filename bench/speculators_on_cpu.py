"""`speculators` with the least that lets `speculators train` run, and finetune, on a machine without a GPU.

    python -m bench.speculators_on_cpu train --from-pretrained converted --draft-attn-impl sdpa ...

Everything that is patched stands in `patch`: nothing else separates these runs from plain speculators.
"""

from __future__ import annotations

from typing import Any


def patch() -> None:
    """Four changes to speculators 0.9.0. The first three are for the CPU, the last is a present to it."""
    import torch
    from speculators.model import DraftVocabMixin
    from speculators.train import trainer

    # 1. Model and batches are moved to the local rank, which is GPU 0 also where there is none.
    trainer.get_local_rank = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    # 2. The step timer synchronizes an accelerator.
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]

    # 3. Mixed precision is asked for on "cuda" where there is no accelerator, which is none at all.
    class CpuTrainer(trainer.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.device_type = "cpu"

    trainer.Trainer = CpuTrainer  # type: ignore[misc]

    # 4. `convert` leaves out an embedding that the head has not, and `from_pretrained` then takes whatever
    # lies in memory for it. No figure can be made of that: it gets the verifier's, as the head expects.
    def load_verifier_weights(self: Any) -> None:
        self._load_verifier_weights(overwrite_embed_tokens=True)

    DraftVocabMixin.load_verifier_weights = load_verifier_weights  # type: ignore[method-assign]


if __name__ == "__main__":
    patch()
    from speculators.cli import app

    app()
