"""What the states say is held against what the verifier said: right ones pass, wrong ones do not."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from common.content_check import ContentCheck, Doubtful
from common.hidden_states import CaptureRow, Damaged

H = 8


def row_of(length: int) -> CaptureRow:
    return CaptureRow(0, torch.arange(length) + 7, torch.ones(length, dtype=torch.int64))


@pytest.fixture
def content() -> ContentCheck:
    """Token k follows from the direction k: an identity head over eight tokens."""
    return ContentCheck(norm=torch.linspace(0.5, 3.0, H), lm_head=torch.eye(H), eps=1e-6)


def pointing_at(content: ContentCheck, tokens: list[int]) -> torch.Tensor:
    """[T, 4, H] whose last state says `tokens[t]` after position t, at a scale of 20."""
    states = torch.ones(len(tokens), 4, H)
    states[:, -1] = torch.eye(H)[tokens] * 20 / content.norm + 0.1
    return states.bfloat16()


def test_hits_count_supervised_tokens_that_the_state_before_them_says(content: ContentCheck) -> None:
    row = CaptureRow(0, torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 0, 1, 1, 1]))
    assert content.hits(row, pointing_at(content, [7, 2, 3, 4, 0])) == (3, 3)
    assert content.hits(row, pointing_at(content, [1, 2, 7, 7, 0])) == (1, 3)


def test_a_row_without_supervised_tokens_is_not_judged(content: ContentCheck) -> None:
    row = CaptureRow(0, torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.int64))
    assert content.hits(row, pointing_at(content, [1, 2, 0])) == (0, 0)


def test_states_that_say_what_the_verifier_says_agree_fully(content: ContentCheck) -> None:
    said = [1, 2, 3, 4, 5, 6, 7, 0]
    assert content.compare(row_of(8), pointing_at(content, said), torch.tensor(said)) == 1.0


def test_shifted_states_are_called_shifted(content: ContentCheck) -> None:
    said = [1, 2, 3, 4, 5, 6, 7, 0]
    shifted = pointing_at(content, said).roll(1, 0)
    with pytest.raises(Damaged, match="shifted by one position"):
        content.compare(row_of(8), shifted, torch.tensor(said))


def test_states_of_another_layer_are_called_so(content: ContentCheck) -> None:
    said = [1, 2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(Damaged, match="another layer"):
        content.compare(row_of(8), pointing_at(content, said[::-1]), torch.tensor(said))


@pytest.mark.parametrize(
    ("hits", "rate", "doubted"),
    # At half of 0.8, 2 of 16 have a chance of 0.018 and 3 one of 0.065; at half of 0.3, 0 of 16 one of 0.074.
    [(2, 0.8, True), (3, 0.8, False), (0, 0.3, False), (0, 0.4, True)],
)
def test_a_glance_doubts_rows_with_improbably_few_hits(
    content: ContentCheck, hits: int, rate: float, doubted: bool
) -> None:
    row = CaptureRow(0, torch.arange(17) % H, torch.ones(17))
    right = row.token_ids.roll(-1).tolist()
    said = [right[t] if t < hits else int(row.token_ids[t]) for t in range(17)]
    with pytest.raises(Doubtful, match=f"{hits} of 16") if doubted else nullcontext():
        assert content.glance(row, pointing_at(content, said), torch.tensor(said), rate) == (hits, 16)


def test_a_glance_doubts_a_row_after_which_the_verifier_says_something_else(content: ContentCheck) -> None:
    row, said = CaptureRow(0, torch.arange(H), torch.ones(H)), torch.full((H,), -1)
    states = pointing_at(content, [1, 2, 3, 4, 5, 6, 7, 0])
    said[-1] = 0
    assert content.glance(row, states, said, 0.9) == (7, 7)
    said[-1] = 3
    with pytest.raises(Doubtful, match=r"another token after the row than the verifier itself \(3\)"):
        content.glance(row, states, said, 0.9)
    # A server may name either of two tokens that differ by less than 3 %, but not one that is 5 % behind.
    states[-1, -1, 3] = states[-1, -1, 0] * content.norm[0] / content.norm[3] * 0.98
    assert content.glance(row, states, said, 0.9) == (7, 7)
    states[-1, -1, 3] = states[-1, -1, 0] * content.norm[0] / content.norm[3] * 0.95
    with pytest.raises(Doubtful):
        content.glance(row, states, said, 0.9)
    states[:, -1] = 1e25  # finite, but not its square
    with pytest.raises(Doubtful):
        content.glance(row, states, said, 0.0)


def test_one_position_alone_refutes_no_row(content: ContentCheck) -> None:
    said = [1, 2, 3, 4, 5, 6, 7, 0]
    states = pointing_at(content, [1, 2, 3, 4, 5, 6, 7, 1])
    assert content.compare(row_of(8), states, torch.tensor(said)) == 7 / 8
    with pytest.raises(Damaged, match="at 75% of 8 positions"):
        content.compare(row_of(8), pointing_at(content, [1, 2, 3, 4, 5, 6, 0, 1]), torch.tensor(said))


def test_only_positions_at_which_the_verifier_was_asked_are_compared(content: ContentCheck) -> None:
    said = torch.tensor([1, 2, -1, -1, -1, -1, -1, 0])
    assert content.compare(row_of(8), pointing_at(content, [1, 2, 0, 0, 0, 0, 0, 0]), said) == 1.0


def test_threads_that_ask_at_once_get_their_own_answers(content: ContentCheck) -> None:
    row = CaptureRow(0, torch.arange(17) % H, torch.ones(17))
    right = row.token_ids.roll(-1).tolist()
    found: dict[int, tuple[int, int]] = {}

    def ask(hits: int) -> None:
        said = [right[t] if t < hits else int(row.token_ids[t]) for t in range(17)]
        found[hits] = content.glance(row, pointing_at(content, said), torch.tensor(said), 0.0)

    with content._working:  # all of them wait, and one answers
        threads = [threading.Thread(target=ask, args=(hits,)) for hits in range(17)]
        for thread in threads:
            thread.start()
        while content._waiting.qsize() < 17:
            pass
    for thread in threads:
        thread.join()
    assert found == {hits: (hits, 16) for hits in range(17)}
    assert content._waiting.empty()
