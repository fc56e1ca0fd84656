"""What a training run writes beside its checkpoints, and when what an earlier run left may go."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter

from safetensors.torch import load_file

from common import acceptance, atomic_io, drafter, load_test, log, manifest, model_card
from common.acceptance import Acceptance
from common.errors import InputError
from common.train_checkpoints import newest_step
from common.train_inputs import Inputs
from common.train_start import Start
from common.training import Outcome

_LOG = log.get("train_output")
_STEP0 = "step0.json"
# Two runs that differ in one of these are two runs; folders, devices and what is kept decide nothing.
_DECIDING = (
    *("finetune_from", "finetune_revision", "draft_vocab", "embedding", "init_missing", "train_lm_head"),
    *("num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("rope_theta", "rms_norm_eps", "max_position_embeddings", "head_layer_ids"),
    *("lr", "epochs", "max_steps", "ttt_steps", "total_seq_len", "optimizer", "weight_decay"),
    *("scheduler", "warmup_ratio", "eval_ratio", "seed"),
    *("gradient_accumulation_steps", "max_time", "anchor"),
)


class Output:
    """`checkpoints/`, `drafter/` and, on demand, `specforge/`.

    What an earlier run left is discarded only when the new start has been measured: a misspelt flag costs
    nothing.

    Attributes:
        drafter: its manifest says that the run is finished.
        checkpoints: of the run, its step-0 acceptance and its metrics.
    """

    def __init__(self, args: argparse.Namespace, inputs: Inputs) -> None:
        self.drafter, self.checkpoints = args.run_dir / "drafter", args.run_dir / "checkpoints"
        self._specforge = args.run_dir / "specforge"
        self._args, self._verifier, self._token_counts = args, inputs.model, inputs.token_counts
        self._failed = inputs.failed
        finished = (self.drafter / manifest.NAME).exists()
        self._fresh = args.overwrite or not (args.resume or finished)
        self._record = manifest.Manifest(
            stage="04_train",
            config={name: getattr(args, name) for name in _DECIDING}
            | {
                "verifier": inputs.model.name,
                "shard": args.shard and args.shard.making,
                "hidden_states": "online" if inputs.online else None,
            },
            inputs=inputs.fingerprints,
            facts={**inputs.facts, **inputs.model.facts()},
            accepted_stale=inputs.accepted_stale,
        )

    def begin(self) -> bool:
        """Whether there is work to do; a run that was begun with other settings is refused."""
        if self._fresh:
            return True
        working = self._begin(overwrite=False)
        try:
            self.step0()
        except InputError:
            manifest.abandon(self.drafter)
            raise
        return working

    def step0(self) -> dict[str, Acceptance] | None:
        """What the run that is resumed had measured before its first step.

        Raises:
            InputError: the checkpoints are of a run with other settings.
        """
        path = self.checkpoints / _STEP0
        if self._fresh or not path.exists():
            return None
        begun = atomic_io.read_json(path)
        if begun["config"] != self._record.config:
            raise InputError(
                f"{self.checkpoints} holds a run with other settings, though {self.drafter} knows of none. "
                "Pass --no-resume to start again, or another --run-dir to keep it."
            )
        return {source: Acceptance.from_json(row) for source, row in begun["step0"].items()}

    def clear_for(self, start: Start) -> None:
        """Discard what an earlier run left, unless it is resumed, and keep the new one's step 0."""
        if self._fresh:
            for folder in (self.checkpoints, self._specforge):
                shutil.rmtree(folder, ignore_errors=True)
            self._begin(overwrite=True)
        parts = {source: part.as_json() for source, part in start.step0.items()}
        atomic_io.write_json(self.checkpoints / _STEP0, {"config": self._record.config, "step0": parts})

    def abandon(self) -> None:
        """After a failure before the first step: other settings may follow, unless a run can be resumed."""
        if not self._fresh and newest_step(self.checkpoints) is None:
            manifest.abandon(self.drafter)

    def finish(self, start: Start, outcome: Outcome) -> None:
        """Write the best drafter, in bfloat16, and what it is worth beside its start.

        A shard that is not the last one only leaves word that its states may go.
        """
        shard, run_dir = self._args.shard, self._args.run_dir
        if shard and not shard.is_last:
            shard.record_trained(run_dir, self._failed)
            _LOG.info("shard %s is trained; its states go when 03 captures the next one", shard)
            return
        _show(start.step0, outcome)
        drafter.save(start.model, self.drafter, load_file(outcome.best_weights))
        if self._args.load_test:
            load_test.require_loadable(self.drafter, start.model, self._verifier)
        record = self._record
        record.facts |= {
            "d2t": start.vocab.fingerprint,
            "step0": {source: part.as_json() for source, part in start.step0.items()},
            "best": {source: part.as_json() for source, part in outcome.best.items()},
            "coverage": None if self._token_counts is None else start.vocab.coverage(self._token_counts),
            "sources": dict(Counter(start.rows.sources[row] for row in start.rows.trained)),
        }
        record.counts = start.rows.counts() | {
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "bad_steps": outcome.bad_steps,
        }
        model_card.write(self.drafter, record)
        record.write(self.drafter)
        if shard:
            shard.record_trained(run_dir, self._failed)
        _LOG.info("%s: done", self.drafter)
        self.export()

    def export(self) -> None:
        """Write the finished drafter in the other layout, if that is asked for and not there yet."""
        if self._args.export is None or (self._specforge / manifest.NAME).exists():
            return
        drafter.export_specforge(self.drafter, self._specforge, self._verifier)
        # By this copy a run that starts from the folder notices when it is made again.
        shutil.copyfile(self.drafter / manifest.NAME, self._specforge / manifest.NAME)
        _LOG.info("%s: the same drafter in the midlayer layout", self._specforge)

    def _begin(self, *, overwrite: bool) -> bool:
        return manifest.begin(
            self.drafter, self._record, overwrite=overwrite, accept_stale=self._args.accept_stale
        )


def _show(step0: dict[str, Acceptance], outcome: Outcome) -> None:
    _LOG.info("held-out acceptance length, offline:")
    for source in [*outcome.best, None] if len(outcome.best) > 1 else [None]:
        before, after = (
            acceptance.total(parts.values()) if source is None else parts[source]
            for parts in (step0, outcome.best)
        )
        _LOG.info(
            "  %-20s start %.3f -> step %d %.3f (%d drafts)",
            *(source or "all", before.length, outcome.best_step, after.length, after.drafts),
        )
    if acceptance.total(outcome.best.values()).length <= acceptance.total(step0.values()).length:
        _LOG.warning("no checkpoint is better than the start: train longer, or with another --lr")
