"""What is watched beside a run: a loss that explodes, and steps that wait for data."""

from __future__ import annotations

import math
import statistics
from collections import deque

from common import log

_LOG = log.get("train_guards")
# Packed batches of one run differ by less than half of their median (15.1 to 22.4 in the tests' run): three
# times the median is no mixture of rows. 50 batches follow a falling loss, and a median of 50 is not moved by
# the explosion itself until it has lasted for 25 batches. Ten are the fewest that make a median.
_EXPLODED, _WINDOW, _FEWEST = 3.0, 50, 10
# Above a few per cent another reading process costs less than the GPU that waits.
_WAIT_LIMIT = 0.05


class LossWatch:
    """Compares each batch's loss with the median of those before it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def exploded(self, loss: float) -> float | None:
        """Take in a batch's loss.

        Args:
            loss: of one packed batch; what is not finite is the gradient guard's.

        Returns:
            The running median, where the loss is more than three times as large; otherwise None.
        """
        if not math.isfinite(loss):
            return None
        median = statistics.median(self._recent) if len(self._recent) >= _FEWEST else None
        self._recent.append(loss)
        return median if median is not None and loss > _EXPLODED * median else None


class Pace:
    """How much of the steps' time went into waiting for their batches.

    Attributes:
        waited: seconds that steps waited for a batch. The first batch of an epoch is not counted: reading
            processes start then.
        worked: seconds of their computation.
    """

    def __init__(self) -> None:
        self.waited = self.worked = 0.0
        self._warned = False

    @property
    def share(self) -> float:
        """Waiting, as a share of both."""
        return self.waited / max(self.waited + self.worked, 1e-9)

    def tell(self, *, ended: bool) -> None:
        """Say at the end what waiting cost, and once, as soon as a checkpoint, where it is too much.

        Args:
            ended: whether the run is over.
        """
        if ended:
            _LOG.info("%.1f %% of the steps' time was spent waiting for data", 100 * self.share)
        if self.share > _WAIT_LIMIT and not self._warned:
            self._warned = True
            _LOG.warning(
                "steps wait for data %.1f %% of their time: raise --num-workers (and --loader-memory), or "
                "move hidden_states/ to a faster disk",
                100 * self.share,
            )
