"""What states say: whether the last one still gives the token that the verifier gave."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import comb
from queue import SimpleQueue
from typing import TYPE_CHECKING

from common.hidden_states import CaptureRow, Damaged

if TYPE_CHECKING:
    import torch

    from common.verifier import Verifier

_POST_NORM_TOLERANCE = 0.02
# bfloat16 keeps 8 bits and fp8 four: tokens whose logits differ by less than this part of the largest are
# equal to a server that has not rounded the states as the store does, and it may name either.
_LOGIT_TOLERANCE = 2**-5
_AGREEMENT = 0.9
_COMPARED = 256  # positions of a row: their logits are held at once, 84 MB at Kimi's 163,840
# Chance of so few hits at half the usual rate (answers differ) below which a row is in doubt.
_IMPROBABLE = 0.05


class Doubtful(Damaged):
    """States of one row that are not stored before the verifier has said more about the row."""

    def __init__(self, detail: str) -> None:
        super().__init__("content", detail)


@dataclass(frozen=True)
class ContentCheck:
    """Does the last state still say what the verifier said? `argmax(lm_head(norm(state)))` against tokens.

    Share of the positions at which they agree, measured on SmolLM2's answers to 174 prompts: right states
    1.00, rounded to fp8 0.999, those of layer 27 of 30 0.54, after the final norm 0.28, shifted by one
    position 0.05, another row's 0.03.

    Attributes:
        norm: [H] float32, the final norm's gain.
        lm_head: [V, H] bfloat16 or float32.
        eps: of the final norm.
        positions: how many supervised tokens of a row are looked at.
    """

    norm: torch.Tensor
    lm_head: torch.Tensor
    eps: float
    positions: int = 16
    _waiting: SimpleQueue[_Question] = field(default_factory=SimpleQueue, init=False, repr=False)
    _working: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @classmethod
    def of(cls, verifier: Verifier) -> ContentCheck:
        """Read norm and head out of the verifier's shards."""
        import torch

        # Half the memory, and 5 ms a row instead of 18 (Zen 5) where the processor multiplies bfloat16.
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return cls(
            norm=verifier.final_norm(),
            lm_head=verifier.tensor("lm_head").to(torch.bfloat16 if fast else torch.float32),
            eps=float(getattr(verifier.config, "rms_norm_eps", 1e-6)),
        )

    def hits(self, row: CaptureRow, states: torch.Tensor) -> tuple[int, int]:
        """How many of the row's supervised tokens the state before them predicts.

        Args:
            row: its token ids and loss mask.
            states: [T, A+1, H] bfloat16.

        Returns:
            Hits, and tokens looked at: at most `positions`, evenly spread. A token that bfloat16 cannot tell
            from the best one is a hit.
        """
        looked_at = self._looked_at(row)
        behind = self._behind(states[looked_at, -1], row.token_ids[looked_at + 1])
        return int((behind == 0).sum()), len(looked_at)

    def glance(
        self, row: CaptureRow, states: torch.Tensor, said: torch.Tensor, rate: float
    ) -> tuple[int, int]:
        """Look at a few tokens of a row, and at what the verifier said after it.

        Args:
            row: its token ids and loss mask.
            states: [T, A+1, H] bfloat16.
            said: [T] int64, the token that the verifier ranks first after each position; only the last is
                looked at.
            rate: share of the supervised tokens that other rows' states predict.

        Returns:
            As `hits`.

        Raises:
            Doubtful: the last state gives another token, or there are so few hits that half of `rate` would
                give more in 95 of 100 rows (binomial distribution).
        """
        import torch

        looked_at = self._looked_at(row)
        # One product for both questions: what it costs is reading lm_head.
        behind = self._behind(
            torch.cat([states[looked_at, -1], states[-1:, -1]]),
            torch.cat([row.token_ids[looked_at + 1], said[-1:]]),
        )
        if not bool(behind[-1] <= _LOGIT_TOLERANCE):
            raise Doubtful(
                f"row {row.index}: norm and lm_head of the last state give another token after the row than "
                f"the verifier itself ({int(said[-1])})"
            )
        hits = int((behind[:-1] == 0).sum())
        if _chance_of_at_most(hits, len(looked_at), rate / 2) < _IMPROBABLE:
            raise Doubtful(
                f"row {row.index}: the states predict {hits} of {len(looked_at)} supervised tokens, "
                f"where those of other rows predict {rate:.0%}"
            )
        return hits, len(looked_at)

    def compare(self, row: CaptureRow, states: torch.Tensor, said: torch.Tensor) -> float:
        """Compare a row's last states with the verifier's own predictions, at 256 positions spread over it.

        Args:
            row: its token ids.
            states: [T, A+1, H] bfloat16.
            said: [T] int64, the token that the verifier ranks first after each position, -1 where unknown.

        Returns:
            The share of positions that agree.

        Raises:
            Damaged: fewer than 90 % do, and it is not one position alone; the message names the likeliest
                mistake.
        """
        known = _spread((said >= 0).nonzero()[:, 0], _COMPARED)
        agreement = self._agreement(states, said, known, 0)
        if (1 - agreement) * len(known) > max(1.0, (1 - _AGREEMENT) * len(known)):
            shifted = max(self._agreement(states, said, known, by) for by in (1, -1))
            raise Damaged(
                "content",
                f"row {row.index}: norm and lm_head of the last state give the verifier's own next token "
                f"at {agreement:.0%} of {len(known)} positions, expected {_AGREEMENT:.0%} or more. "
                "A drafter trained on such states learns nothing, without an error. "
                f"{self._diagnosis(states[:, -1].float(), shifted)}",
            )
        return agreement

    def _looked_at(self, row: CaptureRow) -> torch.Tensor:
        """[n] int64: positions before supervised tokens."""
        return _spread(row.loss_mask[1:].nonzero()[:, 0], self.positions)

    def _diagnosis(self, last: torch.Tensor, shifted: float) -> str:
        scale = (last / self.norm).pow(2).mean(-1).sqrt()
        if bool(((scale - 1).abs() < _POST_NORM_TOLERANCE).float().mean() > _AGREEMENT):
            return "The states have the final norm applied already; they must be taken before it."
        if shifted >= _AGREEMENT:
            return "The states are shifted by one position against the tokens."
        return "They come from another layer than the last, or from another model than --verifier."

    def _agreement(self, states: torch.Tensor, said: torch.Tensor, at: torch.Tensor, shift: int) -> float:
        """Share of the positions `at` where the states `shift` positions on say what the verifier says."""
        at = at[(at + shift >= 0) & (at + shift < len(states))]
        behind = self._behind(states[at + shift, -1], said[at])
        return float((behind <= _LOGIT_TOLERANCE).float().mean())

    def _behind(self, last: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[n] float32: how far states [n, H] put tokens [n] behind the best one.

        In parts of the largest absolute logit; 0 where the token is the best one. What costs time is reading
        lm_head: a thread answers for all that wait for it.
        """
        import torch

        mine = _Question(last.float(), tokens)
        self._waiting.put(mine)
        with self._working:
            if mine.answer is None:
                asked = [self._waiting.get() for _ in range(self._waiting.qsize())]
                if mine not in asked:  # a thread that failed has taken it
                    asked.append(mine)
                states = torch.cat([question.last for question in asked])
                found = self._behind_now(states, torch.cat([question.tokens for question in asked]))
                sizes = [len(question.tokens) for question in asked]
                for question, answer in zip(asked, found.split(sizes), strict=True):
                    question.answer = answer
        assert mine.answer is not None
        return mine.answer

    def _behind_now(self, last: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        normed = last * (last.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.norm
        logits = torch.nn.functional.linear(normed.to(self.lm_head.dtype), self.lm_head)
        named = logits.gather(1, tokens[:, None])[:, 0].float()
        high, low = logits.amax(-1).float(), logits.amin(-1).float()
        return (high - named) / torch.maximum(high.abs(), low.abs())


@dataclass(eq=False)
class _Question:
    """What one thread wants to know of `_behind`."""

    last: torch.Tensor
    tokens: torch.Tensor
    answer: torch.Tensor | None = None


def _spread(positions: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` of the positions [n] int64, evenly spread."""
    import torch

    if len(positions) <= count:
        return positions
    return positions[torch.linspace(0, len(positions) - 1, count).long()]


def _chance_of_at_most(hits: int, tokens: int, rate: float) -> float:
    """Of so few hits or fewer among so many tokens, if each is one with the chance `rate`."""
    return sum(comb(tokens, n) * rate**n * (1 - rate) ** (tokens - n) for n in range(hits + 1))
