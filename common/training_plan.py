"""`04_train.py --plan`: what a run takes, from configs alone, each number with its formula.

Nothing of the run has to be there: no states, no weights, no network. What no file on this machine tells is
given by --assume; what neither tells is asked for by name.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil

from common import log, manifest, plan_sizes
from common.loader_memory import LOADERS, PREFETCH, WORKERS
from common.plan_sizes import ASSUMABLE, HEAD_KEYS, Sizes, assumption
from common.store_forms import StoreForm

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_AUX = 3
_FLOAT, _HALF = 4, 2  # bytes of float32 and bfloat16
# Peak memory of whole steps on a CPU (SmolLM2's shape, 512 and 1,024 tokens, bfloat16 and float32) lay above
# weights, gradients, moments and the tensors of `activation_bytes` by 0.3 to 0.6 of the latter.
_SCRATCH = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan."""
    group = parser.add_argument_group("Plan")
    group.add_argument(
        "--plan",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="print parameters, memory, disk, steps and hours by their formulas, and stop; no weights needed",
    )
    group.add_argument(
        "--assume",
        type=assumption,
        nargs="+",
        default=[],
        metavar="NAME=NUMBER",
        help=f"for --plan, what no file tells yet: {', '.join(ASSUMABLE)}",
    )
    group.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="for --plan, memory of a GPU (10^9 bytes); default: of the GPU that is visible",
    )
    group.add_argument(
        "--tokens-per-second",
        type=float,
        metavar="N",
        help="for --plan, what all processes train together (metrics.jsonl has it); without it no hours",
    )


def show(args: argparse.Namespace) -> None:
    """Print the plan of the run that `args` describe.

    Raises:
        InputError: names every number that nothing tells.
    """
    plan = Plan.of(args)
    sections = {
        "Known": plan.known(),
        "Parameters": plan.parameters(),
        f"Memory of a {'CPU process' if args.device == 'cpu' else 'GPU'}": plan.memory(),
        "Host memory and disk": plan.host(),
        "Steps and time": plan.time(),
    }
    for title, lines in sections.items():
        print(f"\n{title}")
        for line in lines:
            print(f"  {line.name:<28} {line.value:>12}  {line.formula}".rstrip())
    print("\n" + plan.verdict())


@dataclass(frozen=True)
class Line:
    """One number: what it is, how much, and how it comes about."""

    name: str
    value: str
    formula: str = ""


@dataclass(frozen=True)
class Plan:
    """A run's numbers.

    Attributes:
        args: of 04.
        sizes: each of `ASSUMABLE`.
        origins: where each is known from.
        layer: more of the head's config.json that decides shapes: layers, norms, biases.
    """

    args: argparse.Namespace
    sizes: Sizes
    origins: dict[str, str]
    layer: dict[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Gather what files, flags and --assume tell, in this order.

        Raises:
            InputError: names every number that nothing tells.
        """
        sizes, origins, head = plan_sizes.gather(args)
        return cls(args, sizes, origins, head)

    @cached_property
    def model(self) -> Eagle3DraftModel:
        """speculators' own model, without memory."""
        import torch
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from transformers import LlamaConfig, Qwen3Config

        layer: dict[str, Any] = {
            **{key: getattr(self.sizes, name.replace("-", "_")) for name, key in HEAD_KEYS.items()},
            "num_hidden_layers": self.layer.get("num_hidden_layers", 1),
            "attention_bias": bool(self.layer.get("attention_bias", False)),
        }
        transformer = (
            Qwen3Config(**layer) if self.layer.get("model_type") == "qwen3" else LlamaConfig(**layer)
        )
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=transformer,
            draft_vocab_size=self.sizes.draft_vocab_size,
            norm_before_residual=False,
            norm_before_fc=bool(self.layer.get("norm_before_fc", False)),
            fc_norm=bool(self.layer.get("fc_norm", False)),
            eagle_aux_hidden_state_layer_ids=list(range(1, _AUX + 1)),
        )
        with torch.device("meta"):
            model = Eagle3DraftModel(config)
        model.lm_head.weight.requires_grad_(self.args.train_lm_head)
        return model

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def frozen(self) -> int:
        """Parameters without: the embedding and the verifier's head and norm."""
        return sum(p.numel() for p in self.model.parameters() if not p.requires_grad)

    @property
    def token_bytes(self) -> int:
        """A token's states in bfloat16."""
        return (_AUX + 1) * self.sizes.hidden_size * _HALF

    # ------------------------------------------------------------------------------------------------------

    def known(self) -> Iterator[Line]:
        """What the plan rests on, and where it is from."""
        for name, origin in self.origins.items():
            value = getattr(self.sizes, name.replace("-", "_"))
            yield Line(name, f"{value:,}", f"{ASSUMABLE[name]} ({origin})")

    def parameters(self) -> Iterator[Line]:
        """Counts, from speculators' model on the meta device."""
        h, d, i = self.sizes.hidden_size, self.sizes.draft_vocab_size, self.sizes.intermediate_size
        q, kv = self.sizes.attention, self.sizes.num_kv_heads * self.sizes.head_dim
        yield Line("trained", f"{self.trained:,}", "sum of the next ones, and norms")
        yield Line("  fc", f"{_AUX * h * h:,}", f"H x {_AUX} H = {h} x {_AUX * h}")
        yield Line("  attention", f"{2 * h * (q + 2 * kv) + h * q:,}", f"2 H x ({q} + 2 x {kv}) + H x {q}")
        yield Line("  MLP", f"{3 * h * i:,}", f"3 x H x I = 3 x {h} x {i}")
        if self.args.train_lm_head:
            yield Line("  lm_head", f"{d * h:,}", f"D x H = {d} x {h}")
        what = "embedding V x H, the verifier's lm_head D x H and norm"
        yield Line(
            "frozen", f"{self.frozen:,}", what if self.args.train_lm_head else f"{what}, lm_head D x H"
        )

    def memory(self) -> Iterator[Line]:
        """What one process holds at its fullest moment."""
        for name, size, formula in self._fixed():
            shown = f"{formula} / {self._shares} (--fsdp)" if self._shares > 1 else formula
            yield Line(name, log.human_bytes(size / self._shares), shown)
        for name, size, formula in self._copies():
            yield Line(name, log.human_bytes(size), formula)
        yield Line("activations", log.human_bytes(self.activations), activation_formula(self.args.ttt_steps))
        scratch = f"{_SCRATCH} x activations (estimated; 0.3 to 0.6 measured on a CPU)"
        yield Line("scratch", log.human_bytes(_SCRATCH * self.activations), scratch)
        yield Line("total", log.human_bytes(self.total), f"with {self.args.total_seq_len} tokens a batch")

    @property
    def _shares(self) -> int:
        """Devices among which --fsdp shares what `_fixed` tells."""
        return self.sizes.gpus if self.args.fsdp else 1

    def _fixed(self) -> Iterator[tuple[str, float, str]]:
        """What lasts through the run: name, bytes of all of it, formula."""
        trained, everything = self.trained, self.trained + self.frozen
        yield "weights", _FLOAT * everything, f"4 B x {everything:,}"
        yield "gradients", _FLOAT * trained, f"4 B x {trained:,}"
        if self.args.optimizer == "muon":
            from speculators.train.optimizers import split_named_params_for_muon

            matrices = sum(p.numel() for _, p in split_named_params_for_muon(self.model)[0])
            size = 2 * _FLOAT * trained - _FLOAT * matrices
            yield "moments", size, f"muon: 4 B x {matrices:,}, adamw: 8 B x {trained - matrices:,}"
        else:
            yield "moments", 2 * _FLOAT * trained, f"adamw: 8 B x {trained:,}"
        if self.args.anchor:
            yield "anchor", _HALF * trained, f"2 B x {trained:,}"

    def _copies(self) -> Iterator[tuple[str, float, str]]:
        """What each process has whole during a step: name, bytes, formula."""
        trained, everything = self.trained, self.trained + self.frozen
        if self._shares > 1:
            # FSDP gathers all outside of the layers as one group, the frozen embedding included, and keeps it
            # through the step; a layer is gathered when its turn comes.
            yield "gathered weights", _HALF * everything, f"2 B x {everything:,} (bfloat16, frozen ones too)"
            accumulated = self.args.gradient_accumulation_steps > 1
            size, dtype = (_FLOAT, "float32, accumulated") if accumulated else (_HALF, "bfloat16")
            yield "gathered gradients", size * trained, f"{size} B x {trained:,} ({dtype}, until shared out)"
            return
        if self.sizes.gpus > 1:
            yield "DDP's buckets", _FLOAT * trained, f"4 B x {trained:,}"
        if self.args.device != "cpu":
            copied = trained + self.sizes.draft_vocab_size * self.sizes.hidden_size
            form = f"2 B x {copied:,} (autocast: trained, verifier's lm_head)"
            yield "bfloat16 copies", _HALF * copied, form

    @property
    def activations(self) -> int:
        """Bytes that forward and backward keep."""
        return self.activations_of(self.args.total_seq_len)

    def activations_of(self, tokens: int) -> int:
        """As `activations`, for a batch of so many tokens."""
        return activation_bytes(
            tokens,
            self.args.ttt_steps,
            hidden=self.sizes.hidden_size,
            intermediate=self.sizes.intermediate_size,
            attention=self.sizes.attention,
            draft_vocab=self.sizes.draft_vocab_size,
            layers=self.model.config.transformer_layer_config.num_hidden_layers,
            dense_mask=self.args.device == "cpu",
        )

    @property
    def total(self) -> float:
        """Bytes of a process at its fullest moment."""
        return self._total_of(self.args.total_seq_len)

    def _total_of(self, tokens: int) -> float:
        fixed = sum(size for _, size, _ in self._fixed()) / self._shares
        copies = sum(size for _, size, _ in self._copies())
        return fixed + copies + (1 + _SCRATCH) * self.activations_of(tokens)

    def host(self) -> Iterator[Line]:
        """Shared memory of the loaders, and disk."""
        args = self.args
        workers = args.num_workers
        if workers is None:
            workers = 0 if args.device == "cpu" else WORKERS
        batches = f"{self.sizes.gpus} processes x {LOADERS} loaders x {workers} workers x {PREFETCH} batches"
        size: float = self.sizes.gpus * LOADERS * workers * PREFETCH * args.total_seq_len * self.token_bytes
        form = f"{batches} x {args.total_seq_len} tokens x {self.token_bytes:,} B; /dev/shm may allow less"
        limit = args.loader_memory
        if limit and 1e9 * limit < size:
            size, form = 1e9 * limit, f"--loader-memory, which allows fewer than {batches}"
        yield Line("loader memory", log.human_bytes(size), form)
        yield self._states()
        ignored = self.model._keys_to_ignore_on_save
        saved = sum(t.numel() for name, t in self.model.state_dict().items() if name not in ignored)
        one = _FLOAT * saved + 2 * _FLOAT * self.trained
        kept = args.keep_last + 2
        number = f"({args.keep_last} newest + best + one being written)"
        form = f"(4 B x {saved:,} + 8 B x {self.trained:,}) x {number}"
        yield Line("checkpoints/", log.human_bytes(kept * one), form)
        yield Line("drafter/", log.human_bytes(_HALF * saved), f"2 B x {saved:,}")
        if args.export:
            saved -= self.sizes.vocab_size * self.sizes.hidden_size
            yield Line(f"{args.export}/", log.human_bytes(_HALF * saved), f"2 B x {saved:,} (no embedding)")

    def _states(self) -> Line:
        """The disk of 03's states, in the form that it stored them in or in each that it may."""
        args, name = self.args, "hidden_states/"
        if args.hidden_states == "online":
            return Line(name, log.human_bytes(0), "--hidden-states online stores none")
        tokens: float = self.sizes.rows * self.sizes.row_tokens
        form = f"{self.sizes.rows:,} rows x {self.sizes.row_tokens:,} tokens"
        if args.shard:
            tokens *= args.eval_ratio + (1 - args.eval_ratio) / args.shard.count
            form += f" x ({args.eval_ratio:g} held out + {1 - args.eval_ratio:g} / {args.shard.count} shards)"
        folder = (args.data_from or args.run_dir) / "hidden_states"
        if (folder / manifest.NAME).exists():
            stored = StoreForm.of(manifest.read(folder, "03_capture_hidden.py").facts)
            form += f" x {stored.formula(_AUX + 1, self.sizes.hidden_size)}, as 03 stored them ({stored})"
        else:
            stored = StoreForm()
            others = (
                f"{kind} {log.human_bytes(tokens * self._stored_bytes(StoreForm(kind)))}"
                for kind in ("mixed", "fp8")
            )
            form += (
                f" x {stored.formula(_AUX + 1, self.sizes.hidden_size)} in {stored}; by 03's --store-dtype "
                f"{', '.join(others)}; --compress zstd and --trim make it less"
            )
        return Line(name, log.human_bytes(tokens * self._stored_bytes(stored)), form)

    def _stored_bytes(self, form: StoreForm) -> int:
        return form.bytes_per_token(_AUX + 1, self.sizes.hidden_size)

    def time(self) -> Iterator[Line]:
        """Steps, and hours where the speed is known."""
        args = self.args
        tokens = int(self.sizes.rows * (1 - args.eval_ratio)) * self.sizes.row_tokens
        accumulated = args.gradient_accumulation_steps
        a_step = args.total_seq_len * self.sizes.gpus * accumulated
        steps = args.epochs * math.ceil(tokens / a_step)
        form = (
            f"{args.epochs} epochs x {tokens:,} trained tokens / ({args.total_seq_len} x {self.sizes.gpus} "
            f"processes x {accumulated} batches); packing leaves gaps, so a few more"
        )
        yield Line("steps", f"{min(steps, args.max_steps or steps):,}", form)
        trained = min(
            args.epochs * tokens, steps * a_step if args.max_steps is None else args.max_steps * a_step
        )
        yield Line("tokens", log.human_count(trained), "trained, all epochs")
        speed = args.tokens_per_second
        if speed:
            form = f"{trained:,} / {speed:g} tokens/s / 3600, held-out measures apart"
            yield Line("hours", f"{trained / speed / 3600:.1f}", form)

    def verdict(self) -> str:
        """Whether the memory is enough, and for what it would be."""
        limit, origin = _memory(self.args)
        if limit is None:
            return "Whether it fits is not known: no GPU is visible. Pass --gpu-memory GB."
        if self.total <= limit:
            return f"It fits: {log.human_bytes(self.total)} of {log.human_bytes(limit)} ({origin})."
        fitting = [n for n in range(128, self.args.total_seq_len, 128) if self._total_of(n) <= limit]
        fsdp = "; --fsdp shares weights out" if self.sizes.gpus > 1 and not self.args.fsdp else ""
        way = f"--total-seq-len {fitting[-1]} would" if fitting else f"no --total-seq-len does{fsdp}"
        return (
            f"It does not fit: {log.human_bytes(self.total)} of {log.human_bytes(limit)} ({origin}); {way}."
        )


def activation_bytes(
    tokens: int,
    steps: int,
    *,
    hidden: int,
    intermediate: int,
    attention: int,
    draft_vocab: int,
    layers: int = 1,
    dense_mask: bool = False,
) -> int:
    """Bytes of tensors alive at the fullest moment of forward and backward, in bfloat16 autocast.

    The coefficients are counts: live storages of speculators' model on the CPU were added up for varied
    shapes. Left out are ids, masks and rotary tables, some hundred bytes a token. For a GPU it is an
    estimate: flex attention and a fused loss keep less.

    Args:
        tokens: T, of a packed batch.
        steps: K, TTT steps.
        hidden: H.
        intermediate: I.
        attention: heads x head_dim, Q.
        draft_vocab: D.
        layers: of the drafter; more than one is an estimate.
        dense_mask: attention over packed rows is dense, as on a CPU.
    """
    h = (10 + 50 * steps * layers) * hidden
    i = 8 * steps * layers * intermediate
    q = (16 * steps + 2 * steps**2) * layers * attention
    d = (16 + 8 * steps) * draft_vocab
    return tokens * (h + i + q + d) + (tokens**2 * (steps**2 + 2 * steps) if dense_mask else 0)


def activation_formula(steps: int) -> str:
    """`activation_bytes` with K put in."""
    return (
        f"T x ({10 + 50 * steps} H + {8 * steps} I + {16 * steps + 2 * steps**2} Q + {16 + 8 * steps} D), "
        f"bfloat16, K = {steps} (counted on a CPU; estimated for a GPU)"
    )


def _memory(args: argparse.Namespace) -> tuple[float | None, str]:
    if args.device == "cpu":
        return psutil.virtual_memory().total, "memory of this machine"
    if args.gpu_memory:
        return 1e9 * args.gpu_memory, "--gpu-memory"
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return None, ""
