"""Acceptance length: counted offline on captured states, and read from vLLM's counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import InputError

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from common.verifier import Verifier

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_LOGIT_BYTES = 2**28  # of [positions, V] float32 logits at a time: 409 positions at V = 163,840

Interval = tuple[float, float]


@dataclass(frozen=True)
class Acceptance:
    """How many draft tokens the verifier accepted.

    Attributes:
        drafts: number of drafts (one a verification step).
        accepted: accepted[k] = drafts whose tokens 0..k were all accepted.
    """

    drafts: int
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> list[float]:
        """Share of drafts whose tokens 0..k were all accepted, for each k."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted]

    @property
    def length(self) -> float:
        """Tokens that a verification step yields: `1 + sum_k P(tokens 0..k accepted)`, tau in EAGLE-3."""
        return 1.0 + sum(self.by_position)

    def as_json(self) -> dict[str, Any]:
        """`{acceptance_length, by_position, drafts}`, for logs and reports."""
        return {"acceptance_length": self.length, "by_position": self.by_position, "drafts": self.drafts}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Acceptance:
        """The inverse of `as_json`."""
        return cls(row["drafts"], tuple(round(share * row["drafts"]) for share in row["by_position"]))


# ----------------------------------------------------------------------------------------------------------
# Offline: counted on captured states
#
# In training a draft token is fed the data's own tokens, not the ones drafted before it. While those were
# right both are the same, and a draft counts no further, so the chain is what serving accepts (exactly so
# for rows answered at temperature 0). Right means the verifier's choice over its whole vocabulary:
# speculators compares inside the draft vocabulary and read 0.286 where serving gave 0.207.


def measure_offline(
    model: Eagle3DraftModel, batches: Iterable[dict[str, Any]], verifier: Verifier, ttt_steps: int
) -> Acceptance:
    """Acceptance of a drafter on rows with captured states.

    Args:
        model: on any device.
        batches: as speculators collates them, states in bfloat16 or in the model's dtype.
        verifier: gives the lm_head.
        ttt_steps: K, draft tokens in a chain.
    """
    lm_head = verifier.tensor("lm_head").to(model.device).float()
    counts = (
        count_accepted(model, batch, verifier_choices(model, batch, lm_head), ttt_steps).sum(0).tolist()
        for batch in batches
    )
    return total(Acceptance(drafts, tuple(accepted)) for drafts, *accepted in counts)


def verifier_choices(model: Eagle3DraftModel, batch: dict[str, Any], lm_head: torch.Tensor) -> torch.Tensor:
    """The token that the verifier prefers after each supervised position, over its whole vocabulary.

    Args:
        model: its `verifier_norm` has the verifier's weight and epsilon.
        batch: `verifier_last_hidden_states` [1, T, H], `loss_mask` [1, T].
        lm_head: [V, H] float32, the verifier's, on the model's device.

    Returns:
        [T] int64 on the model's device; -1 where nothing is supervised.
    """
    import torch

    mask = batch["loss_mask"][0].bool()
    choices = torch.full(mask.shape, -1, dtype=torch.int64, device=model.device)
    states = batch["verifier_last_hidden_states"][0][mask].to(model.device)
    if len(states):
        at_once = max(1, _LOGIT_BYTES // (4 * len(lm_head)))
        with torch.no_grad():
            chosen = [
                (model.verifier_norm(some.float()) @ lm_head.T).argmax(-1) for some in states.split(at_once)
            ]
        choices[mask.to(model.device)] = torch.cat(chosen)
    return choices


def count_accepted(
    model: Eagle3DraftModel, batch: dict[str, Any], choices: torch.Tensor, ttt_steps: int
) -> torch.Tensor:
    """Drafts of each packed row, and how many of their tokens the verifier would accept.

    A draft starts at each position from which on K positions of one row are supervised; the last K - 1 of an
    answer start none, because what the verifier would say after them was not captured.

    Args:
        model: on any device; `input_ids` etc. are moved there.
        batch: `hidden_states` [1, T, 3H], `input_ids`, `document_ids`, `loss_mask`, `position_ids` [1, T].
        choices: [T] int64, from `verifier_choices`.
        ttt_steps: K.

    Returns:
        [rows, 1 + K] int64: drafts, then those whose tokens 0..k were all right.
    """
    import torch

    names = ("hidden_states", "input_ids", "document_ids", "loss_mask", "position_ids")
    inputs = {name: batch[name].to(model.device) for name in names}
    states = inputs["hidden_states"]
    mixed = torch.autocast(states.device.type, torch.bfloat16, enabled=states.dtype == torch.bfloat16)
    with torch.no_grad(), mixed:
        drafted = torch.cat(model(**inputs, ttt_steps=ttt_steps))
    tokens = drafted if model.d2t is None else drafted + model.d2t[drafted]
    return _count_chains(tokens, choices, inputs["loss_mask"][0].bool(), inputs["document_ids"][0])


def _count_chains(
    tokens: torch.Tensor, choices: torch.Tensor, supervised: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Count drafts and accepted prefixes of a row; token k of the draft at i is judged by choice i + k.

    Args:
        tokens: [K, T] int64, drafted at each position in each step, the verifier's ids.
        choices: [T] int64.
        supervised: [T] bool.
        rows: [T] int64, the packed row of each position, -1 for padding.

    Returns:
        [rows, 1 + K] int64.
    """
    import torch

    steps, length = tokens.shape
    starts = max(0, length - steps + 1)
    right = torch.ones(starts, dtype=torch.bool, device=tokens.device)
    for step in range(steps):
        right &= supervised[step : step + starts] & (rows[step : step + starts] == rows[:starts])
    columns = [right]
    for step in range(steps):
        columns.append(columns[-1] & (tokens[step, :starts] == choices[step : step + starts]))
    counts = torch.zeros(int(rows.max()) + 1, 1 + steps, dtype=torch.int64, device=tokens.device)
    return counts.index_add_(0, rows[:starts].clamp(min=0), torch.stack(columns, 1).long())


# ----------------------------------------------------------------------------------------------------------
# Served: what vLLM counts


@dataclass(frozen=True)
class Counters:
    """What a vLLM server has counted since it started, out of its `/metrics`, summed over its engines.

    Attributes:
        drafts: drafts proposed and verified.
        accepted: accepted[k] = drafts whose tokens 0..k were all accepted; empty where nothing is drafted.
        output_tokens: tokens generated.
        prefix_caching: whether some engine may answer a prompt out of its cache.
    """

    drafts: int
    accepted: tuple[int, ...]
    output_tokens: int
    prefix_caching: bool

    @classmethod
    def parse(cls, text: str) -> Counters:
        """Read the Prometheus text of one server.

        Raises:
            InputError: it is not vLLM's.
        """
        from prometheus_client.parser import text_string_to_metric_families

        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

        def total(name: str, **labels: str) -> int:
            return int(
                sum(
                    s.value
                    for s in samples
                    if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()
                )
            )

        if not any(sample.name == "vllm:generation_tokens_total" for sample in samples):
            raise InputError(
                "/metrics has no vllm:generation_tokens_total: the server is not vLLM, or was started with "
                "--disable-log-stats, and acceptance cannot be read from it. Start it without that flag."
            )
        per_position = "spec_decode_num_accepted_tokens_per_pos_total"
        positions = {int(s.labels["position"]) for s in samples if s.name == f"vllm:{per_position}"}
        return cls(
            drafts=total("spec_decode_num_drafts_total"),
            accepted=tuple(total(per_position, position=str(k)) for k in sorted(positions)),
            output_tokens=total("generation_tokens_total"),
            prefix_caching=total("cache_config_info", enable_prefix_caching="True") > 0,
        )

    @property
    def num_speculative_tokens(self) -> int:
        """K that the server drafts with; 0 when it does not speculate."""
        return len(self.accepted)

    @property
    def acceptance(self) -> Acceptance:
        """The drafts and what was accepted of them."""
        return Acceptance(self.drafts, self.accepted)

    def __add__(self, other: Counters) -> Counters:
        """Two servers together."""
        return self._combine(other, 1)

    def __sub__(self, earlier: Counters) -> Counters:
        """What happened between two readings of the same servers."""
        return self._combine(earlier, -1)

    def _combine(self, other: Counters, sign: int) -> Counters:
        return Counters(
            self.drafts + sign * other.drafts,
            tuple(a + sign * b for a, b in zip(self.accepted, other.accepted, strict=True)),
            self.output_tokens + sign * other.output_tokens,
            self.prefix_caching or other.prefix_caching,
        )


def of_steps(accepted_by_step: Sequence[int], num_speculative_tokens: int) -> Acceptance:
    """Acceptance of one answer from vLLM's `per_step_accepted`.

    Args:
        accepted_by_step: draft tokens that were accepted in each verification step.
        num_speculative_tokens: K.
    """
    accepted = (
        sum(count > position for count in accepted_by_step) for position in range(num_speculative_tokens)
    )
    return Acceptance(len(accepted_by_step), tuple(accepted))


def split_steps(accepted_by_step: Sequence[int], tokens: int) -> tuple[list[int], list[int]]:
    """Part the verification steps of one answer at a token, e.g. at the end of the thinking.

    The prefill yields token 0; step i then yields `accepted_by_step[i] + 1` tokens and belongs where the
    first of them lies.

    Args:
        accepted_by_step: draft tokens that were accepted in each verification step.
        tokens: length of the first part.

    Returns:
        The steps of the first `tokens` tokens, and the rest.
    """
    position = 1
    for step, count in enumerate(accepted_by_step):
        if position >= tokens:
            return list(accepted_by_step[:step]), list(accepted_by_step[step:])
        position += count + 1
    return list(accepted_by_step), []


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """All drafts of several prompts together (they must share K)."""
    parts = list(parts)
    accepted = zip(*(part.accepted for part in parts), strict=True)
    return Acceptance(sum(part.drafts for part in parts), tuple(sum(column) for column in accepted))


# ----------------------------------------------------------------------------------------------------------
# How sure a number is: percentile bootstrap over prompts
#
# Drafts of one answer resemble each other, so drafts are no independent draws; prompts are. Each resample
# draws as many prompts as there are, with replacement, and divides summed counts by summed drafts.


@dataclass(frozen=True)
class Intervals:
    """95 % intervals of an acceptance length and of its shares by position."""

    length: Interval
    by_position: list[Interval]


@dataclass(frozen=True)
class Difference:
    """Acceptance length of b minus that of a on the same prompts, with its 95 % interval."""

    value: float
    interval: Interval

    @property
    def sign(self) -> int:
        """1 when b is longer, -1 when a is, 0 when the interval holds 0."""
        low, high = self.interval
        return (low > 0) - (high < 0)


def intervals(prompts: Sequence[Acceptance], *, seed: int = 0) -> Intervals | None:
    """95 % bootstrap intervals over prompts; None for fewer than two prompts."""
    if len(prompts) < 2:
        return None
    shares = _shares(_counts(prompts), _draws(len(prompts), seed))
    low, high = _percentiles(shares)
    length_low, length_high = _percentiles(1 + shares.sum(axis=1))
    return Intervals(
        (float(length_low), float(length_high)),
        [(float(lower), float(upper)) for lower, upper in zip(low, high, strict=True)],
    )


def difference(a: Sequence[Acceptance], b: Sequence[Acceptance], *, seed: int = 0) -> Difference | None:
    """Compare two drafters on the same prompts, resampled together; None for fewer than two prompts.

    Args:
        a: one entry a prompt.
        b: the same prompts in the same order.
        seed: of the resampling.
    """
    if len(a) < 2:
        return None
    draws = _draws(len(a), seed)
    gain = _shares(_counts(b), draws).sum(axis=1) - _shares(_counts(a), draws).sum(axis=1)
    low, high = _percentiles(gain)
    return Difference(total(b).length - total(a).length, (float(low), float(high)))


def _counts(prompts: Sequence[Acceptance]) -> np.ndarray:
    """[P, 1 + K]: drafts, then accepted by position."""
    return np.array([[prompt.drafts, *prompt.accepted] for prompt in prompts], dtype=np.float64)


def _draws(prompts: int, seed: int) -> np.ndarray:
    """[resamples, P]: how often each prompt is drawn."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES)


def _shares(counts: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """[resamples, K]: share of drafts accepted up to each position."""
    sums = draws @ counts
    # A resample may consist of answers of one token, which have no draft.
    return sums[:, 1:] / np.maximum(sums[:, :1], 1)


def _percentiles(values: np.ndarray) -> np.ndarray:
    tail = 100 * (1 - _CONFIDENCE) / 2
    return np.percentile(values, [tail, 100 - tail], axis=0)
