"""What the stages before have left for a training run, after it was found to belong together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import manifest, trim, verifier
from common.draft_vocab import DraftVocab, Ids, read_array
from common.errors import InputError
from common.online import OnlineStates
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
        online: the server that the states come from; None where they are stored.
    """

    folder: Path
    facts: dict[str, Any]
    failed: list[int]
    model: Verifier
    vocab: DraftVocab | None
    token_counts: Ids | None
    fingerprints: dict[str, str]
    accepted_stale: list[str]
    online: OnlineStates | None = None

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
        stale: list[str] = []
        if args.hidden_states == "online":
            made = manifest.read(folder / "dataset", "01b_generate_synthetic.py")
        else:
            made, stale = manifest.require_made_from(
                folder / "hidden_states",
                upstream,
                made_by="03_capture_hidden.py",
                accept_stale=args.accept_stale,
            )
        fingerprints = {"dataset": manifest.fingerprint(folder / "dataset")}
        if args.shard:
            fingerprints["hidden_states"] = manifest.fingerprint_of_making(made)
        elif args.hidden_states == "stored":
            fingerprints["hidden_states"] = manifest.fingerprint(folder / "hidden_states")
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
        model = verifier.from_args(args, made.facts)
        found = cls(folder, made.facts, [], model, vocab, counts, fingerprints, stale)
        if args.hidden_states == "online":
            model.require_tokenizer_of(made.facts, f"{folder / 'dataset'}/")
            return found._online(args)
        model.require_tokenizer_of(made.facts, f"{folder / 'hidden_states'}/")
        _require_shard(args, made)
        failed = {int(row) for row in made.counts.get("failures", {})}
        if args.shard:
            failed.update(args.shard.failed_before(args.run_dir))
        return replace(found, failed=sorted(failed))

    def _online(self, args: argparse.Namespace) -> Inputs:
        """The same with a server in place of stored states, and what 03 would have recorded."""
        online = OnlineStates.settle(args, self.folder, self.model, self.facts.get("layer_ids"))
        *ids, last = online.layer_ids
        facts = {"layer_ids": ids, "final_layer_id": last, "pre_norm": True, "dtype": "bfloat16"}
        return replace(self, facts={**self.facts, **self.model.facts(), **facts}, online=online)


def _require_shard(args: argparse.Namespace, states: manifest.Manifest) -> None:
    """Both stages must take the same rows for those of a shard."""
    count = states.facts.get("shards")
    if count is None:
        return
    if args.shard is None or args.shard.count != count:
        raise InputError(
            f"hidden_states/ holds one of {count} shards, this run wants {args.shard or 'all rows'}. Pass "
            f"--shard i/{count} to both stages, or capture all rows with `03_capture_hidden.py --overwrite`."
        )
    if args.data_from:
        raise InputError(
            "--data-from with shards: 03 looks into its own run folder for what is trained, and must find it "
            "there before it deletes states. Train in that run folder."
        )
    if states.facts["eval_ratio"] != args.eval_ratio:
        raise InputError(
            f"--eval-ratio {args.eval_ratio}: 03 took {states.facts['eval_ratio']} for its shards, and other "
            "rows would be held out. Pass the same to both stages."
        )
