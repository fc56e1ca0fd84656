"""A loss is compared with the median of those before it; waiting is a share of the steps' time."""

from __future__ import annotations

import logging

import pytest

from common.train_guards import LossWatch, Pace


def test_three_times_the_median_of_at_least_ten_losses_is_an_explosion() -> None:
    watch = LossWatch()
    assert [watch.exploded(loss) for loss in (90.0, 8.0, 9.0, 10.0, 11.0, 12.0, 10.0, 10.0, 10.0)] == [
        None
    ] * 9
    assert watch.exploded(90.0) is None  # nine are too few
    assert watch.exploded(30.0) is None  # just three times
    assert watch.exploded(30.1) == 10.0


def test_what_is_not_finite_is_not_taken_in() -> None:
    watch = LossWatch()
    for _ in range(10):
        watch.exploded(10.0)
    for _ in range(50):
        assert watch.exploded(float("nan")) is None
        assert watch.exploded(float("inf")) is None
    assert watch.exploded(31.0) == 10.0


def test_a_falling_loss_is_followed() -> None:
    watch = LossWatch()
    for step in range(200):
        watch.exploded(100.0 - step / 2.5)
    # The last 50 fall from 40 to 20.4: their median is 30.2, where that of all would be 60.2.
    assert watch.exploded(91.0) == pytest.approx(30.2)


def test_an_explosion_that_lasts_is_reported_until_it_is_the_median() -> None:
    watch = LossWatch()
    for _ in range(50):
        watch.exploded(10.0)
    told = [watch.exploded(100.0) for _ in range(50)]
    assert told[:25] == [10.0] * 25
    assert told[26:] == [None] * 24


def test_waiting_is_told_at_the_end_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace()
    pace.waited, pace.worked = 4.0, 96.0
    with caplog.at_level(logging.INFO, "stage.train_guards"):
        pace.tell(ended=False)
        assert caplog.messages == []
        pace.waited = 24.0
        pace.tell(ended=False)
        pace.tell(ended=True)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "wait for data 20.0 % of their time: raise --num-workers" in caplog.messages[0]
    assert caplog.messages[1] == "20.0 % of the steps' time was spent waiting for data"
