"""What the stages before have left for a training run, after it was found to belong together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import manifest, trim, verifier
from common.draft_vocab import DraftVocab, Ids, read_array
from common.verifier import Verifier


@dataclass(frozen=True)
class Inputs:
    """The folders that a run reads, after they were found to belong together.

    Attributes:
        folder: the run folder with dataset/, hidden_states/ and vocab/.
        facts: what 03 recorded.
        failed: rows that 03 gave up.
        model: the verifier.
        vocab: 02's draft vocabulary; None where the drafter needs none of it.
        token_counts: [V] int64, from 02; None without.
        fingerprints: of all that was read.
        accepted_stale: inputs that had changed and were accepted.
    """

    folder: Path
    facts: dict[str, Any]
    failed: list[int]
    model: Verifier
    vocab: DraftVocab | None
    token_counts: Ids | None
    fingerprints: dict[str, str]
    accepted_stale: list[str]

    @property
    def rows(self) -> Path:
        """The data set that the states belong to: `dataset/`, or what 03 left of it (--trim, --fit-disk)."""
        return (
            self.folder / "hidden_states" / trim.FOLDER if "rows" in self.facts else self.folder / "dataset"
        )

    @classmethod
    def settle(cls, args: argparse.Namespace) -> Inputs:
        """Read the manifests and check that states, rows and vocabulary are of one making.

        Raises:
            InputError: something is missing, or was made from something else.
        """
        folder = args.data_from or args.run_dir
        upstream = {"dataset": folder / "dataset"}
        states, stale = manifest.require_made_from(
            folder / "hidden_states", upstream, made_by="03_capture_hidden.py", accept_stale=args.accept_stale
        )
        fingerprints = {name: manifest.fingerprint(folder / name) for name in ("dataset", "hidden_states")}
        vocab = counts = None
        if args.draft_vocab == "rebuild" or (folder / "vocab" / manifest.NAME).exists():
            _, old = manifest.require_made_from(
                folder / "vocab", upstream, made_by="02_build_vocab_map.py", accept_stale=args.accept_stale
            )
            vocab, counts = DraftVocab.load(folder / "vocab"), read_array(folder / "vocab/token_counts.npy")
            fingerprints["vocab"] = manifest.fingerprint(folder / "vocab")
            stale += old
        if args.finetune_from and Path(args.finetune_from).exists():
            fingerprints["finetune_from"] = manifest.fingerprint(Path(args.finetune_from))
        model = verifier.from_args(args, states.facts)
        model.require_tokenizer_of(states.facts, f"{folder / 'hidden_states'}/")
        failed = [int(row) for row in states.counts.get("failures", {})]
        return cls(folder, states.facts, failed, model, vocab, counts, fingerprints, stale)
