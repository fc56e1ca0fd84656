"""Data for the measurements, of any size and always the same: a fresh clone has only the demo's."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import ROOT
from common import atomic_io, dataset

if TYPE_CHECKING:
    from common.verifier import Verifier

_DRAWN = 1000  # different rows; they are written again and again, as drawing takes longer than counting


def write_conversations(file: Path, count: int, model: Verifier) -> None:
    """Conversations of one answer, every fourth of two, in ShareGPT's form; no two have the same prompt.

    Questions are the demo's, answers are sentences that SmolLM2 wrote (`tests/data`), 20 to 200 words.
    """
    chance = random.Random(0)
    questions = [row["conversations"][0]["value"] for row in _json_lines("configs/demo_prompts.jsonl")]
    answers = (
        str(model.tokenizer.decode(row["token_ids"], skip_special_tokens=True))
        for row in _json_lines("tests/data/smollm2_answers.jsonl")
    )
    sentences = [part for answer in answers for part in re.split(r"(?<=[.!?])\s+", answer) if part]
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            turns = []
            for turn in range(1 + (number % 4 == 0)):
                question = f"{chance.choice(questions)} ({number}, {turn})"
                turns.append({"from": "human", "value": question})
                turns.append({"from": "gpt", "value": _answer(chance, sentences)})
            lines.write(json.dumps({"conversations": turns, "source": "bench"}, ensure_ascii=False) + "\n")


def write_prompts(file: Path, count: int) -> None:
    """Prompts of one turn in ShareGPT's form: the demo's, each with a number that makes it another one."""
    questions = [row["conversations"][0]["value"] for row in _json_lines("configs/demo_prompts.jsonl")]
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            turn = {"from": "human", "value": f"{questions[number % len(questions)]} ({number})"}
            lines.write(json.dumps({"conversations": [turn], "source": "bench"}, ensure_ascii=False) + "\n")


def _answer(chance: random.Random, sentences: list[str]) -> str:
    words = chance.randint(20, 200)
    chosen: list[str] = []
    while sum(len(sentence.split()) for sentence in chosen) < words:
        chosen.append(chance.choice(sentences))
    return " ".join(chosen)


def write_rows(folder: Path, tokens: int, model: Verifier) -> int:
    """A data set of random rows of 200 to 2,000 tokens, by Zipf's law; the last three quarters supervised.

    Each ends in a stop token, as answers do.

    Args:
        folder: becomes a `dataset/` of ours, which speculators reads too.
        tokens: of all rows together, at least.
        model: whose vocabulary and stop tokens.

    Returns:
        The tokens written.
    """
    import numpy as np

    vocab_size, stop = model.vocab_size, model.stop_ids
    random_ids = np.random.default_rng(0)
    # Frequency falls with rank as in text, and ranks lie anywhere in the vocabulary.
    spread = random_ids.permutation(vocab_size)

    def row() -> dataset.TrainingRow:
        length = int(random_ids.integers(200, 2001))
        ids = spread[np.minimum(random_ids.zipf(1.2, length) - 1, vocab_size - 1)]
        ids[-1] = stop[length % len(stop)]
        mask = np.arange(length) >= length // 4
        return {
            "input_ids": ids.tolist(),
            "loss_mask": mask.astype(int).tolist(),
            "seq_len": length,
            "id": "bench#0",
            "source": "bench",
        }

    drawn = [row() for _ in range(_DRAWN)]
    lengths = itertools.accumulate(drawn[number % _DRAWN]["seq_len"] for number in itertools.count())
    count, written = next((number + 1, total) for number, total in enumerate(lengths) if total >= tokens)
    dataset.write(folder, (drawn[number % _DRAWN] for number in range(count)))
    return written


def _json_lines(name: str) -> list[dict]:
    return list(atomic_io.read_json_lines(ROOT / name))
