"""Acceptance length: counted offline on captured states, and read from vLLM's counters."""

from __future__ import annotations

from dataclasses import dataclass


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
