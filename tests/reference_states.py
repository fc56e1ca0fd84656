"""A few rows, and how far captured states of them are from those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from common import dataset
from common.hidden_states import HiddenStateStore

TEXTS = [
    "Water boils at a lower temperature on a mountain, because the air presses less.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(2.0))",
    "Le train de nuit part à vingt-deux heures et arrive à l'aube. " * 4,
    "Seventeen times twenty-three is three hundred and ninety-one, as one sees from 17 x 20 + 17 x 3. " * 6,
]


def write_rows(folder: Path, verifier_dir: Path, texts: list[str] = TEXTS) -> list[list[int]]:
    """A data set of `texts`, the first quarter of each as prompt; returns the token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    dataset.write(
        folder,
        (
            {
                "input_ids": ids,
                "loss_mask": [int(position >= len(ids) // 4) for position in range(len(ids))],
                "seq_len": len(ids),
                "id": f"{index}#0",
                "source": "test",
            }
            for index, ids in enumerate(rows)
        ),
    )
    return rows


def relative_errors(
    store: HiddenStateStore, rows: list[list[int]], verifier_dir: Path, ids: list[int]
) -> list[float]:
    """Per captured state, the last after the final norm: a row's largest relative error.

    The reference is transformers' own `hidden_states`, in float32.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.float32).eval()
    norm = model.get_decoder().norm
    worst = [0.0] * (len(ids) + 1)
    for index, token_ids in enumerate(rows):
        stored_ids, states = store.read(index)
        assert stored_ids.tolist() == token_ids
        with torch.no_grad():
            wanted = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
            # transformers has normed its last state, the file has not.
            found = [*states.float().unbind(1)[:-1], norm(states[:, -1].float())]
        for i, layer in enumerate([*ids, len(wanted) - 1]):
            error = torch.linalg.norm(found[i] - wanted[layer][0]) / torch.linalg.norm(wanted[layer][0])
            worst[i] = max(worst[i], float(error))
    return worst
