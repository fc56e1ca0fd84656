"""The verifier: its config, tokenizer, special ids, and its embed, lm_head and norm tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common import atomic_io, hub, log, manifest
from common.errors import InputError

if TYPE_CHECKING:
    import safetensors
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_LOG = log.get("verifier")
TensorName = Literal["embed_tokens", "lm_head", "norm"]

# Suffixes: multimodal verifiers nest the language model (Kimi-K2.5: `language_model.model.norm.weight`,
# Qwen3-VL: `model.language_model.norm.weight`).
_SUFFIXES: dict[TensorName, tuple[str, ...]] = {
    "embed_tokens": ("model.embed_tokens.weight", "embed_tokens.weight"),
    "lm_head": ("lm_head.weight",),
    "norm": ("model.norm.weight", "language_model.norm.weight"),
}

# speculators' GEMMA_STYLE_FINAL_NORM_MODEL_TYPES, which a test compares: importing it takes five seconds.
_NORM_LESS_ONE = frozenset(
    ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a verifier."""
    group = parser.add_argument_group("Verifier")
    group.add_argument(
        "--verifier",
        metavar="PATH|HUB_ID",
        help="folder or hub id; default: the one that the stage before recorded",
    )
    group.add_argument(
        "--revision", help="hub revision (branch, tag or commit); default: the repository's main"
    )
    group.add_argument(
        "--trust-remote-code",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run Python code out of the verifier's repository (Kimi's tokenizer needs it)",
    )
    group.add_argument(
        "--expect-token",
        action="append",
        default=[],
        metavar="TEXT=ID",
        help="stop unless the tokenizer gives this special token this id; repeatable",
    )


def from_args(args: argparse.Namespace, inherited: dict[str, Any] | None = None) -> Verifier:
    """The verifier that the flags or the facts of the stage before name.

    Raises:
        InputError: neither names one, or its config cannot be read.
    """
    facts = inherited or {}
    name = manifest.settle("verifier", flag=args.verifier, inherited=facts.get("verifier"), default=None)
    if name is None:
        raise InputError("no verifier is known yet: pass --verifier with a folder or a hub id")
    hub.refuse_missing_path(name, "--verifier")
    revision = args.revision or (facts.get("revision") if name == facts.get("verifier") else None)
    return Verifier(name, revision, args.trust_remote_code, tuple(args.expect_token))


@dataclass(frozen=True)
class Verifier:
    """A model that vLLM serves, read part by part: never the whole of its weights.

    Attributes:
        name: folder or hub id.
        revision: hub revision, None for the main branch.
        trust_remote_code: whether code of the repository may run.
        expected_tokens: `TEXT=ID` each; checked when the tokenizer is loaded.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    expected_tokens: tuple[str, ...] = ()

    @cached_property
    def config(self) -> PretrainedConfig:
        """The language model's config (the nested `text_config` of a multimodal one).

        Raises:
            InputError: the folder or repository has no readable config.
        """
        return getattr(self._outer_config, "text_config", self._outer_config)

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model is a part of what the folder holds."""
        return self.config is not self._outer_config

    @cached_property
    def _outer_config(self) -> PretrainedConfig:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(
                self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, ImportError, StrictDataclassError) as error:
            raise InputError(f"{self._said}: its config cannot be read: {error}") from error

    @property
    def commit(self) -> str | None:
        """The commit of a hub's verifier that was read; the revision asked for, where none is known."""
        return getattr(self._outer_config, "_commit_hash", None) or self.revision

    @property
    def _said(self) -> str:
        """The flag with its value; a mistyped path has the form of a hub id, and is looked for there."""
        missing = "" if Path(self.name).is_dir() else " (no such folder, so a hub id)"
        return f"--verifier {self.name}{missing}"

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the rows of the embedding (may exceed the tokenizer's size)."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """N; the id of the last layer's output before the final norm."""
        return self.config.num_hidden_layers

    @property
    def default_layer_ids(self) -> list[int]:
        """vLLM's own default for EAGLE-3: `[2, N//2, N-3]`, id L being the output after L layers."""
        return [2, self.num_layers // 2, self.num_layers - 3]

    def settle_layer_ids(
        self, flag: list[int] | None, inherited: list[int] | None, *, three: bool
    ) -> list[int]:
        """Choose the aux ids, and refuse those that would be captured as something else than meant.

        Args:
            flag: `--layer-ids`.
            inherited: what the stage before recorded.
            three: whether only three will do.

        Raises:
            InputError: they are not ascending ids below the last layer's.
        """
        last = self.num_layers
        ids = manifest.settle("layer ids", flag=flag, inherited=inherited, default=self.default_layer_ids)
        counted = (
            f"Ids count as in vLLM: id L is the output after L of the verifier's {last} layers. SpecForge, "
            "TorchSpec and SGLang count from 0: add one to each of theirs."
        )
        if last in ids:
            raise InputError(
                f"--layer-ids {ids}: {last}, the last layer, is always captured beside the three; "
                "name three below it"
            )
        if (len(ids) != 3 and three) or ids != sorted(set(ids)):
            raise InputError(f"--layer-ids {ids}: expected three different ids in ascending order. {counted}")
        if ids[0] < 1 or ids[-1] >= last:
            raise InputError(f"--layer-ids {ids}: expected ids from 1 to {last - 1}. {counted}")
        if ids == [layer - 1 for layer in self.default_layer_ids]:
            _LOG.warning("layer ids: %s look as if they were counted from 0. %s", ids, counted)
        return ids

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, after its special ids were compared with `expected_tokens`.

        Raises:
            InputError: it cannot be loaded, or a token has another id than expected.
        """
        from transformers import AutoTokenizer

        expected = [self._expectation(text) for text in self.expected_tokens]
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"{self._said}: its tokenizer cannot be loaded: {error}") from error
        for text, wanted in expected:
            found = tokenizer.convert_tokens_to_ids(text)
            if found != wanted:
                raise InputError(
                    f"{self.name}: the tokenizer gives {text!r} the id {found}, --expect-token {wanted}. "
                    "Shifted special ids train the drafter on tokens that the server never emits, without an "
                    "error. Pass --trust-remote-code if the tokenizer needs it, or correct the expectation."
                )
        return tokenizer

    @staticmethod
    def _expectation(said: str) -> tuple[str, int]:
        text, _, token_id = said.rpartition("=")
        if not text or not token_id.isdecimal():
            raise InputError(f"--expect-token {said}: expected TEXT=ID, e.g. '<|im_end|>=163586'")
        return text, int(token_id)

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end an answer: the generation config's (else the config's) and the tokenizer's."""
        from transformers import GenerationConfig

        try:
            ids = GenerationConfig.from_pretrained(self.name, revision=self.revision or "main").eos_token_id
        except OSError:
            ids = None
        ids = self.config.eos_token_id if ids is None else ids
        found = set(ids if isinstance(ids, list) else [ids]) | {self.tokenizer.eos_token_id}
        return sorted(found - {None})

    def require_tokenizer_of(self, facts: dict[str, Any], origin: str) -> None:
        """Check that rows were made with this tokenizer.

        Args:
            facts: of the stage that made them; without a tokenizer's fingerprint nothing is checked.
            origin: the folder, for the error.

        Raises:
            InputError: they were made with another one.
        """
        made_with = facts.get("tokenizer")
        if made_with not in (None, self.facts()["tokenizer"]):
            raise InputError(
                f"{origin} holds ids of {facts.get('verifier')}; {self.name} has another tokenizer. The "
                "ids would name other tokens without an error. Leave --verifier out to take the recorded one."
            )

    def facts(self) -> dict[str, Any]:
        """What later stages must agree on, for the manifest."""
        tokenizer = self.tokenizer
        return {
            "verifier": self.name,
            "revision": self.revision,
            "tokenizer": manifest.fingerprint_of(sorted(tokenizer.get_vocab().items())),
            "chat_template": manifest.fingerprint_of(tokenizer.chat_template),
        }

    def final_norm(self) -> torch.Tensor:
        """The final norm as a plain gain `x * w`, [H] float32: Gemma and Qwen3.5 store `w - 1`."""
        stored = self.tensor("norm").float()
        return stored + 1 if self.config.model_type in _NORM_LESS_ONE else stored

    def tensor(self, name: TensorName) -> torch.Tensor:
        """One tensor in its stored dtype, out of the one shard that holds it.

        Args:
            name: `embed_tokens` [V, H], `lm_head` [V, H] (the embedding where tied) or `norm` [H].

        Raises:
            InputError: no shard has it, a shard is missing or damaged, or its shape does not fit the config.
        """
        found = self._find(name)
        if found is None and name == "lm_head" and self._is_tied:
            return self.tensor("embed_tokens")
        if found is None:
            tie = ", and its config does not tie lm_head to the embedding" if name == "lm_head" else ""
            raise InputError(f"{self.name}: no tensor ends in {' or '.join(_SUFFIXES[name])}{tie}")
        key, file = found
        with self._shard(file) as shard:
            tensor = shard.get_tensor(key)
        wanted = (self.hidden_size,) if name == "norm" else (self.vocab_size, self.hidden_size)
        if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
            raise InputError(
                f"{self.name}: {key} is {list(tensor.shape)} {tensor.dtype}, "
                f"expected {list(wanted)} in floating point"
            )
        return tensor

    @property
    def _is_tied(self) -> bool:
        """By either config: a multimodal one may say it outside of its `text_config`."""
        configs = (self.config, self._outer_config)
        return any(getattr(config, "tie_word_embeddings", False) for config in configs)

    def _find(self, name: TensorName) -> tuple[str, str] | None:
        for suffix in _SUFFIXES[name]:
            keys = [key for key in self._weight_map if key == suffix or key.endswith("." + suffix)]
            if keys:
                key = min(keys, key=len)
                return key, self._weight_map[key]
        return None

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """Tensor name -> shard file, from the index or from the single file."""
        index = self._file("model.safetensors.index.json", optional=True)
        if index is None:
            with self._shard("model.safetensors") as shard:
                return dict.fromkeys(shard.keys(), "model.safetensors")
        try:
            return atomic_io.read_json(index)["weight_map"]
        except (KeyError, TypeError):
            raise InputError(f"{index} has no weight_map: download it again") from None

    @contextmanager
    def _shard(self, name: str) -> Iterator[safetensors.safe_open]:
        import safetensors

        file = self._file(name)
        try:
            with safetensors.safe_open(file, framework="pt") as shard:
                yield shard
        except safetensors.SafetensorError as error:
            raise InputError(f"{file} is damaged: {error}. Download it again.") from None

    def _file(self, name: str, optional: bool = False) -> Path | None:
        from transformers.utils import cached_file

        try:
            found = cached_file(
                self.name, name, revision=self.revision, _raise_exceptions_for_missing_entries=not optional
            )
        except OSError as error:
            raise InputError(f"{self._said}: {name} cannot be had: {error}") from None
        return Path(found) if found else None
