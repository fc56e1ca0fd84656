"""The pull towards the imported weights."""

from __future__ import annotations

import torch
from torch import nn

from common.anchor import Anchor


def test_a_pull_takes_back_rate_times_strength_of_the_way() -> None:
    weight, frozen = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([3.0]), False)
    anchor = Anchor([weight, frozen], strength=5.0)
    with torch.no_grad():
        weight += torch.tensor([1.0, 4.0])
        frozen += 1.0
    anchor.pull(rate=0.1)
    assert weight.tolist() == [1.5, 0.0]
    assert frozen.tolist() == [4.0]


def test_the_start_is_kept_in_bfloat16_and_the_weights_in_float32() -> None:
    weight = nn.Parameter(torch.tensor([1.001]))  # bfloat16 has 1.0 there
    Anchor([weight], strength=0.5).pull(rate=1.0)
    assert weight.dtype == torch.float32
    assert weight.item() == torch.tensor(1.0005).item()
