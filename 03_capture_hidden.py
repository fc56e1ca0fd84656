"""Runs dataset/ through the verifier, keeps its hidden states -> hidden_states/hs_<row>.safetensors.

Kimi-K2.5 on eight GPUs, vLLM started here and stopped at the end:
  python 03_capture_hidden.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --serve
a server that runs already (two of them: repeat --endpoint); the first command prints the line that starts it:
  python 03_capture_hidden.py --run-dir runs/kimi --verifier moonshotai/Kimi-K2.5 --print-server
  python 03_capture_hidden.py --run-dir runs/kimi --endpoint http://127.0.0.1:8000/v1
a minute on a laptop CPU, without a server:
  python 03_capture_hidden.py --run-dir runs/laptop --backend transformers
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from common import atomic_io, capture_rows, cli, log, manifest, store_forms, verifier, vllm_server
from common.capture import Capture, Rows, verify
from common.capture_rows import Choice
from common.content_check import ContentCheck
from common.errors import InputError
from common.hidden_states import Backend, HiddenStateStore
from common.store_forms import StoreForm

STAGE = Path(__file__).stem
_LOG = log.get(STAGE)
_INCOMING = ".incoming"
_OUTAGE_S = 900.0
_MANAGED_OUTAGE_S = 10.0  # a server that this stage started does not come back by itself


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    verifier.add_arguments(parser)
    vllm_server.add_arguments(parser)
    flag = argparse.BooleanOptionalAction

    rows = parser.add_argument_group("Rows")
    rows.add_argument(
        "--dataset", type=Path, metavar="FOLDER", help="rows in speculators' format; default: RUN_DIR/dataset"
    )
    rows.add_argument(
        "--max-failure-rate",
        type=cli.share,
        default=0.01,
        metavar="SHARE",
        help="stop where a larger share (0 to 1) of the rows fails",
    )
    capture_rows.add_arguments(rows)

    states = parser.add_argument_group("States")
    states.add_argument(
        "--layer-ids",
        type=int,
        nargs="+",
        metavar="ID",
        help="three aux layers, id L = output after L of the N layers; N itself is always added; "
        "default: what the stage before recorded, else 2, N//2, N-3",
    )
    states.add_argument(
        "--backend", choices=("vllm", "transformers"), default="vllm", help="what computes the states"
    )
    states.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the computation, for --backend transformers; default: bfloat16",
    )
    states.add_argument(
        "--store-dtype",
        choices=tuple(store_forms.PRECISIONS),
        default="bfloat16",
        help="of the files: 2, 1 or 1.25 bytes a value; mixed: aux states in fp8, the last one in bfloat16",
    )
    states.add_argument(
        "--compress",
        choices=store_forms.COMPRESSIONS,
        default="none",
        help="pack each file without loss; such files are read by this project's 04 only, as are mixed ones",
    )
    states.add_argument(
        "--batch-tokens",
        type=cli.positive,
        default=2048,
        metavar="TOKENS",
        help="rows x longest row of one batch, for --backend transformers",
    )

    load = parser.add_argument_group("Load")
    load.add_argument(
        "--concurrency",
        type=cli.positive,
        default=32,
        metavar="N",
        help="requests in flight for each endpoint",
    )
    load.add_argument(
        "--shared-folder",
        type=Path,
        metavar="FOLDER",
        help="the only folder that files of an --endpoint are taken from; best on the run folder's file "
        "system, else each file is copied; default: RUN_DIR/hidden_states/.incoming",
    )
    load.add_argument(
        "--max-disk", type=float, metavar="GB", help="largest size of hidden_states/ (10^9 bytes)"
    )

    checks = parser.add_argument_group("Checks")
    checks.add_argument(
        "--content-check",
        action=flag,
        default=True,
        help="compare what the last states predict with what the verifier predicts",
    )
    checks.add_argument(
        "--probe",
        type=cli.positive,
        metavar="ROWS",
        help="capture only this many rows, of any layers, into probe_states/ for 04 --probe-layer-ids",
    )
    checks.add_argument(
        "--verify",
        action=flag,
        default=False,
        help="read a finished store again, by the flags that made it, check every file, and stop",
    )
    checks.add_argument(
        "--print-server",
        action=flag,
        default=False,
        help="show the vLLM command that --endpoint needs, and stop",
    )
    return parser


@cli.stage(build_parser)
def main(args: argparse.Namespace) -> int:
    _refuse_contradictions(args)
    if _is_trained(args):
        return 0
    plan = Plan.settle(args)
    if args.print_server:
        print(shlex.join(plan.server_command))
        return 0
    if args.verify:
        _verify(plan)
        return 0
    inputs = {"dataset": manifest.fingerprint(plan.source)}
    record = manifest.Manifest(stage=STAGE, config=plan.config, inputs=inputs, facts=plan.facts)
    folder = plan.store.folder
    with atomic_io.locked(folder):
        _require_positions(plan)
        plan = replace(plan, choice=plan.choice.fitted(plan.store))
        plan.choice.describe(plan.store)
        _require_space(plan)
        working = manifest.begin(
            folder, record, overwrite=args.overwrite, accept_stale=args.accept_stale, finished=plan.is_done
        )
        if not working:
            return 0
        for path in plan.choice.outdated(plan.store):
            path.unlink()
        todo = sorted(plan.rows.lengths.keys() - plan.store.done(plan.rows.lengths))
        plan.choice.write(folder)
        plan.store.sweep()
        _LOG.info("rows: %d = %d there + %d to do", len(plan.rows), len(plan.rows) - len(todo), len(todo))
        capture = Capture(plan.rows, plan.store, plan.content if todo else None, args.max_failure_rate)
        if todo:
            try:
                with _backend(plan) as backend:
                    # Old states go when the first new ones are right, as the disk may not hold both.
                    asyncio.run(capture.run(backend, todo, partial(manifest.drop_replaced, folder)))
            except BaseException:
                # With nothing to resume, the mended command may differ in anything.
                if manifest.replacing(folder) or not plan.store.done(plan.rows.lengths):
                    manifest.abandon(folder)
                    plan.choice.forget(folder)
                raise
        record.counts = plan.choice.account(capture.counts())
        record.write(folder)
        _LOG.info("%s: %d rows, %s", folder, len(plan.rows), plan.store.describe(record.counts))
    return 0


def _is_trained(args: argparse.Namespace) -> bool:
    """Whether 04 needs no states of this shard any more, so that a driver loop can be run again."""
    if not args.shard or args.verify or args.print_server:
        return False
    if args.overwrite:
        args.shard.warn_of_earlier_run(args.run_dir)
        return False
    trained: bool = args.shard.is_trained(args.run_dir)
    return trained


def _verify(plan: Plan) -> None:
    """Check a finished store again.

    Raises:
        InputError: it was made by other flags or from other rows, by which whole files would look damaged.
        StageError: files are damaged.
    """
    folder, args = plan.store.folder, plan.args
    made, _ = manifest.require_made_from(
        folder, {"dataset": plan.source}, made_by=f"{STAGE}.py", accept_stale=args.accept_stale
    )
    if changed := made.other_settings(plan.config):
        raise InputError(
            f"{folder} was made with other settings: {changed}. --verify goes by the flags: pass the same as "
            "when it was made."
        )
    if args.shard and (held := made.counts.get("shard")) != str(args.shard):
        raise InputError(f"{folder} holds the states of shard {held}: pass --shard {held}.")
    verify(plan.rows, plan.store, plan.content, made.counts)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    capture_rows.check(args)
    if args.backend == "transformers":
        if args.endpoint:
            raise InputError("--backend transformers computes in this process: leave out --endpoint")
        return
    if args.dtype:
        raise InputError("--dtype is for --backend transformers; vLLM's is --server-args '--dtype bfloat16'")
    if re.search(r"(--pipeline[-_]parallel[-_]size|-pp)[ =]?([2-9]|1\d)", args.server_args):
        raise InputError(
            "--server-args asks for pipeline parallelism: the layers of one row would lie in several "
            "processes, and vLLM hands out states of one of them. Use --tensor-parallel-size."
        )
    if "--enable-prefix-caching" in args.server_args.split():
        raise InputError(
            "--server-args turns prefix caching on: a prefix that the server knows is not computed again, "
            "and rows would lack its states. Leave out --enable-prefix-caching."
        )
    if args.print_server or args.verify:
        return
    vllm_server.check(args)
    if args.serve and args.shared_folder:
        raise InputError("--shared-folder belongs to a server of --endpoint; --serve brings its own")


@dataclass(frozen=True)
class Plan:
    """What flags and the stage before have settled; nothing of it changes while the stage works.

    Attributes:
        source: the data set's folder.
        inherited: facts of the stage that made it; none for a data set of speculators' own.
        choice: which of its rows, and parts of rows, are captured.
        layer_ids: the three aux ids.
    """

    args: argparse.Namespace
    source: Path
    inherited: dict[str, Any]
    choice: Choice
    model: verifier.Verifier
    layer_ids: list[int]

    @classmethod
    def settle(cls, args: argparse.Namespace) -> Plan:
        """Read the data set's and the verifier's outlines; nothing is written."""
        source = args.dataset or args.run_dir / "dataset"
        choice = Choice.settle(args, source)
        made = (source / manifest.NAME).exists()
        facts = manifest.read(source, "01b_generate_synthetic.py").facts if made else {}
        model = verifier.from_args(args, facts)
        ids = model.settle_layer_ids(args.layer_ids, facts.get("layer_ids"), three=args.probe is None)
        return cls(args, source, facts, choice, model, ids)

    @property
    def rows(self) -> Rows:
        """What is captured."""
        return self.choice.rows

    @property
    def dtype(self) -> str | None:
        """Of the computation; None where the server decides."""
        return (self.args.dtype or "bfloat16") if self.args.backend == "transformers" else None

    @property
    def config(self) -> dict[str, Any]:
        """What decides the states; a rerun with anything else is refused."""
        return {
            "verifier": self.model.name,
            "layer_ids": self.layer_ids,
            "backend": self.args.backend,
            "dtype": self.dtype,
            "store_dtype": self.args.store_dtype,
            "compress": self.args.compress,
            "probe": self.args.probe,
            **capture_rows.config(self.args),
            **capture_rows.shard_config(self.args),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What training must agree on."""
        return {
            **self.inherited,
            **self.model.facts(),
            "layer_ids": self.layer_ids,
            "final_layer_id": self.model.num_layers,
            "pre_norm": True,
            "dtype": "bfloat16",
            **self.store.form.facts(),
            "backend": self.args.backend,
            **self.choice.facts,
        }

    @property
    def all_ids(self) -> list[int]:
        """The states of a file: the aux layers' (three without `--probe`), and the last one's."""
        return [*self.layer_ids, self.model.num_layers]

    @cached_property
    def store(self) -> HiddenStateStore:
        """What is filled."""
        name = "hidden_states" if self.args.probe is None else "probe_states"
        form = StoreForm(self.args.store_dtype, self.args.compress)
        return HiddenStateStore(self.args.run_dir / name, self.model.hidden_size, len(self.layer_ids), form)

    @property
    def is_done(self) -> bool:
        """Whether every row has its file."""
        lengths = self.rows.lengths
        return len(self.store.done(lengths)) == len(lengths)

    @property
    def content(self) -> ContentCheck | None:
        """The verifier's norm and head, where they are wanted."""
        return ContentCheck.of(self.model) if self.args.content_check else None

    @property
    def shared_folder(self) -> Path:
        """Where the server writes: beside the store, so that taking a file over is a rename."""
        return self.args.shared_folder or self.store.folder / _INCOMING

    @property
    def server_args(self) -> list[str]:
        """vLLM's flags for this capture, and the user's own after them."""
        return [
            *vllm_server.capture_args(self.layer_ids, self.model.num_layers, self.shared_folder),
            # The longest row and the one token that a completion must generate.
            *("--max-model-len", str(self.rows.longest + 1)),
            *vllm_server.split_args(self.args),
        ]

    @property
    def server_command(self) -> list[str]:
        """What starts such a server by hand."""
        return vllm_server.command(self.model, self.server_args, self.args.port or 8000)


def _require_space(plan: Plan) -> None:
    """Print what the states will take, and refuse a run that cannot end before anything is computed.

    Raises:
        InputError: the file system or --max-disk has less room.
    """
    store, lengths, args, size = plan.store, plan.rows.lengths, plan.args, log.human_bytes
    whole = store.bytes_of(lengths)
    there = store.bytes_of({row: lengths[row] for row in store.done(lengths)})
    leaving = there if args.overwrite else sum(path.stat().st_size for path in plan.choice.outdated(store))
    free = store.free_bytes() + leaving + manifest.bytes_to_replace(store.folder)
    missing = whole - (0 if args.overwrite else there)
    _LOG.info(
        "disk: %s tokens x %s = %s, %s of it there; %s free at %s",
        *(log.human_count(sum(lengths.values())), store.formula, size(whole), size(whole - missing)),
        *(size(free), store.folder),
    )
    mend = "make the states smaller (--store-dtype fp8, --trim), "
    if args.shard:
        mend += "or begin anew in more shards (--shard 1/N --overwrite, in both stages)"
    else:
        mend += "take fewer rows (--fit-disk, or 01's --max-samples), or go shard by shard (--shard)"
    if missing > free:
        raise InputError(
            f"{store.folder}: {size(missing)} are still to be written and {size(free)} are free. Free some "
            f"space, put --run-dir on a larger file system, {mend}."
        )
    if args.max_disk is not None and whole > args.max_disk * 1e9:
        raise InputError(
            f"{store.folder}: {size(whole)} are needed, --max-disk allows {size(args.max_disk * 1e9)}. Raise "
            f"it, {mend}."
        )


# --------------------------------------------------------------------------------------------------------
# Backends


@contextmanager
def _backend(plan: Plan) -> Iterator[AbstractAsyncContextManager[Backend]]:
    """What computes the states, to be entered in an event loop; a managed server lives in the block."""
    args = plan.args
    if args.backend == "transformers":
        import torch

        from common.capture_transformers import TransformersBackend

        dtype = getattr(torch, plan.dtype or "")
        yield nullcontext(TransformersBackend(plan.model, plan.store, plan.all_ids, dtype, args.batch_tokens))
        return
    import torch

    # Rows are checked side by side; more threads for each would only be taken from a server on these cores.
    torch.set_num_threads(1)
    shared = plan.shared_folder
    if args.serve:
        # Left by a run that was killed; the folder of a server that runs already is its own business.
        shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir(parents=True, exist_ok=True)
    if shared.stat().st_dev != plan.store.folder.stat().st_dev:
        _LOG.warning("%s is on another file system than the run: files are copied, not renamed", shared)
    log_file = args.run_dir / "logs" / f"{STAGE}.log"
    try:
        with vllm_server.serving(args, plan.model, plan.server_args, log_file) as urls:
            yield _vllm(plan, urls)
    finally:
        if args.serve:
            shutil.rmtree(shared, ignore_errors=True)


def _vllm(plan: Plan, urls: list[str]) -> AbstractAsyncContextManager[Backend]:
    from common import capture_vllm

    return capture_vllm.connected(
        urls,
        plan.model.name,
        plan.store,
        plan.shared_folder,
        plan.all_ids,
        plan.server_command,
        longest=plan.rows.longest,
        concurrency=plan.args.concurrency,
        outage_s=_MANAGED_OUTAGE_S if plan.args.serve else _OUTAGE_S,
    )


def _require_positions(plan: Plan) -> None:
    positions = getattr(plan.model.config, "max_position_embeddings", None)
    if plan.args.backend == "vllm" and positions is not None and plan.rows.longest >= positions:
        row = max(plan.rows.lengths, key=plan.rows.lengths.__getitem__)
        raise InputError(
            f"{plan.source}, row {row} has {plan.rows.longest} tokens, the verifier {positions} positions, "
            "and vLLM needs one for the token that it generates. Make the rows shorter (01b --max-tokens)."
        )


if __name__ == "__main__":
    sys.exit(main())
