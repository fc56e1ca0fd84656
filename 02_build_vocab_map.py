"""Token counts of the answers -> vocab/: which tokens the drafter can propose (d2t, t2d), and the coverage.

  Kimi-K2.5, its stop, thinking and tool markers forced in:
    python 02_build_vocab_map.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  is the rebuilt map worth more than the public head's own?
    python 02_build_vocab_map.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi \\
        --compare-to checkpoints/kimi-k2-instruct-eagle3
  a laptop CPU:
    python 02_build_vocab_map.py --draft-vocab-size 4096 --run-dir runs/laptop
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common import atomic_io, cli, log, manifest, verifier
from common.errors import InputError

if TYPE_CHECKING:
    import datasets

    from common.draft_vocab import DraftVocab, Ids
    from common.verifier import Verifier

_LOG = log.get("02_build_vocab_map")
_SIZES = (1024, 2048, 4096, 8192, 16000, 32000, 64000)
_WORTH_REBUILDING = 0.02  # of the tokens; below it the head's own trained rows are worth more


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    group = parser.add_argument_group("Draft vocabulary")
    group.add_argument(
        "--draft-vocab-size",
        type=int,
        default=32000,
        metavar="D",
        help="tokens that the drafter can propose; each is a row of its lm_head",
    )
    group.add_argument(
        "--force-token",
        action="extend",
        nargs="+",
        default=[],
        metavar="T",
        help="special token (its text or its id) that is in, whatever its count; the stop tokens always are",
    )
    group.add_argument(
        "--compare-to",
        metavar="PATH|HUB_ID",
        help="an EAGLE-3 head: show what share of this data its own map covers, and which is worth it",
    )
    verifier.add_arguments(parser)
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> None:
    # numpy, datasets and transformers take seconds to import; --help does not wait for them.
    from common import dataset
    from common.draft_vocab import DraftVocab, read_array

    source, folder = args.run_dir / "dataset", args.run_dir / "vocab"
    rows = dataset.load(source)
    facts = (
        manifest.read(source, "01b_generate_synthetic.py").facts if (source / manifest.NAME).exists() else {}
    )
    model = verifier.from_args(args, inherited=facts)
    model.require_tokenizer_of(facts, f"{source}/")
    forced = [*model.stop_ids, *(token_id(text, model) for text in args.force_token)]
    theirs = read_own_vocab(args.compare_to, model) if args.compare_to else None
    record = manifest.Manifest(
        stage="02_build_vocab_map",
        config={"draft_vocab_size": args.draft_vocab_size, "force_token": sorted(args.force_token)},
        inputs={"dataset": manifest.fingerprint(source)},
        facts={**facts, **model.facts()},
    )
    again = {"overwrite": args.overwrite, "accept_stale": args.accept_stale}
    with atomic_io.locked(folder):
        if not args.overwrite and not manifest.begin(folder, record, **again):
            vocab, counts = DraftVocab.load(folder), read_array(folder / "token_counts.npy")
        else:
            try:
                counts = count_supervised(rows, model.vocab_size)
                vocab = DraftVocab.most_frequent(counts, args.draft_vocab_size, forced)
                # With --overwrite the old map goes only when the new one is known to be good.
                if args.overwrite:
                    manifest.begin(folder, record, **again)
                save(folder, counts, vocab)
            except BaseException:
                manifest.abandon(folder)
                raise
            record.facts["d2t"] = vocab.fingerprint
            record.counts = describe(counts, vocab, forced)
            record.write(folder)
    show(counts, vocab)
    if theirs:
        compare(args.compare_to, theirs, counts, vocab)


# ----------------------------------------------------------------------------------------------------------
# Counting


def count_supervised(rows: datasets.Dataset, vocab_size: int) -> Ids:
    """Count the tokens that the loss falls on.

    Args:
        rows: with `input_ids` and `loss_mask`.
        vocab_size: V.

    Returns:
        [V] int64.

    Raises:
        InputError: an id is outside of the vocabulary, or nothing is supervised.
    """
    import numpy as np

    from common import dataset

    counts = np.zeros(vocab_size, dtype=np.int64)
    with log.bar(len(rows), unit="rows", description="count") as bar:
        for table in dataset.batches(rows, ("input_ids", "loss_mask")):
            ids, mask = (
                table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                for name in ("input_ids", "loss_mask")
            )
            supervised = ids[mask != 0]
            outside = supervised[(supervised < 0) | (supervised >= vocab_size)]
            if outside.size:
                raise InputError(
                    f"dataset/ has token id {outside[0]}, the verifier ids from 0 to {vocab_size - 1}: the "
                    "rows were made with another tokenizer. Pass the --verifier that they came from."
                )
            counts += np.bincount(supervised, minlength=vocab_size)
            bar.update(table.num_rows)
    if not counts.any():
        raise InputError(
            "dataset/ has no supervised token (every loss_mask is zero), so there is nothing to count"
        )
    return counts


def token_id(text: str, model: Verifier) -> int:
    """The id of a `--force-token`, given as text or as a number."""
    if text.isdecimal():
        return int(text)
    found = model.tokenizer.convert_tokens_to_ids(text)
    # SmolLM2's unknown token is a real one, <|endoftext|>.
    if found is None or (found == model.tokenizer.unk_token_id and text != model.tokenizer.unk_token):
        raise InputError(f"--force-token {text}: the tokenizer of {model.name} has no such token")
    return found


# ----------------------------------------------------------------------------------------------------------
# What is shown and kept


def describe(counts: Ids, vocab: DraftVocab, forced: list[int]) -> dict[str, float | int | list[int]]:
    return {
        "supervised_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "draft_vocab_size": len(vocab),
        "coverage": round(vocab.coverage(counts), 6),
        "forced": sorted(set(forced)),
        "forced_without_count": sorted({token for token in forced if counts[token] == 0}),
    }


def show(counts: Ids, vocab: DraftVocab) -> None:
    from common.draft_vocab import DraftVocab

    total = int(counts.sum())
    _LOG.info(
        "%s supervised tokens, %d distinct; the draft vocabulary (D = %d) covers %.2f %% of them: acceptance "
        "at position 0 can be no higher",
        log.human_count(total),
        (counts > 0).sum(),
        len(vocab),
        100 * vocab.coverage(counts),
    )
    sizes = [size for size in _SIZES if size < len(counts)]
    _LOG.info(
        "coverage by size: %s",
        ", ".join(f"{size}: {DraftVocab.most_frequent(counts, size).coverage(counts):.2%}" for size in sizes),
    )


def read_own_vocab(name: str, model: Verifier) -> DraftVocab:
    from common import warm_start

    return warm_start.read_own_vocab(name, model, flag="--compare-to").vocab


def compare(name: str, own: DraftVocab, counts: Ids, vocab: DraftVocab) -> None:
    """Coverage of a head's own map beside the rebuilt one's, and which is worth it."""
    from common.head_rows import Move

    ours, theirs = vocab.coverage(counts), own.coverage(counts)
    move = Move.between(own, vocab)
    _LOG.info("%s: its own map of %d tokens covers %.2f %% of this data", name, len(own), 100 * theirs)
    rows = ", ".join(f"{count} rows {what}" for what, count in move.counts().items())
    _LOG.info("rebuilt map of %d tokens: %.2f %%; %s", len(vocab), 100 * ours, rows)
    # A token outside of the map is never proposed, so coverage bounds acceptance at position 0; but new rows
    # start untrained: on the shared head 14 points more ended level after 546 steps, ahead at a higher rate.
    if ours - theirs > _WORTH_REBUILDING:
        _LOG.info(
            "worth it: --draft-vocab rebuild lifts the ceiling by %.2f points; its new rows need training",
            100 * (ours - theirs),
        )
    else:
        _LOG.info("not worth it: --draft-vocab checkpoint keeps every trained row and covers about as much")


def save(folder: Path, counts: Ids, vocab: DraftVocab) -> None:
    import numpy as np

    with atomic_io.replacing(folder / "token_counts.npy", "wb") as file:
        np.save(file, counts, allow_pickle=False)
    vocab.save(folder)
    plot_coverage(folder / "coverage.png", counts, vocab)


def plot_coverage(path: Path, counts: Ids, vocab: DraftVocab) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    ranked = np.sort(counts)[::-1]
    share = np.cumsum(ranked) / ranked.sum()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(share) + 1), share)
    axes.plot(
        len(vocab), vocab.coverage(counts), "o", label=f"D = {len(vocab)}: {vocab.coverage(counts):.2%}"
    )
    axes.set(
        xscale="log", xlabel="draft vocabulary (tokens)", ylabel="share of supervised tokens", ylim=(0, 1.02)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_io.staged(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
