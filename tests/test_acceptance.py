"""Offline acceptance: counted by hand, by a slow chain, on packed rows. Served: test_served_acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn

from common import acceptance, dataset, drafter
from common.acceptance import Acceptance
from common.draft_vocab import DraftVocab
from common.hidden_states import HiddenStateStore
from common.verifier import Verifier
from tests.reference_head import HEADS, KV_HEADS

STEPS = 3
Row = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def verifier(verifier_dir: Path) -> Verifier:
    return Verifier(str(verifier_dir))


@pytest.fixture(scope="module")
def rows(captured_run: Path) -> list[Row]:
    """Four real answers with their states, cut to 40 tokens, as speculators' data set gives them."""
    data, store = (
        dataset.load(captured_run / "dataset"),
        HiddenStateStore(captured_run / "hidden_states", 576),
    )
    found = []
    for index in range(4):
        ids, states = store.read(index)
        first = int(data[index]["loss_mask"].nonzero()[0]) - 4
        part = slice(first, first + 40)
        found.append(
            {
                "input_ids": ids[part],
                "loss_mask": data[index]["loss_mask"][part],
                "hidden_states": states[part, :3].flatten(1),
                "verifier_last_hidden_states": states[part, 3],
                "lengths": torch.tensor([40]),
                "position_ids": torch.arange(40),
            }
        )
    return found


@pytest.fixture(scope="module")
def model(public_head: Path, verifier: Verifier) -> Eagle3DraftModel:
    """The public head, put together here without the importer."""
    from safetensors.torch import load_file

    head = load_file(public_head / "model.safetensors")
    state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.items()}
    tokens = (torch.arange(4096) + state["d2t"]).numpy()
    transformer = drafter.transformer_of(verifier, plain_flags())
    assert (transformer.num_attention_heads, transformer.num_key_value_heads) == (HEADS, KV_HEADS)
    config = drafter.new_config(
        transformer, verifier, layer_ids=[2, 15, 27], draft_vocab_size=4096, speculative_tokens=STEPS
    )
    return drafter.build(config, DraftVocab(tokens, 49152), verifier, state).eval()


def plain_flags():
    import argparse

    from common import head_flags

    parser = argparse.ArgumentParser()
    head_flags.add_layer_arguments(parser)
    return parser.parse_args([])


def packed(rows: list[Row], length: int) -> Row:
    return CollateFn(length, 576, dtype=torch.float32, preprocess=shift_batch)(rows)


def chain(model: Eagle3DraftModel, row: Row, start: int, fed: list[int] | None) -> list[int]:
    """Draft three tokens at one position as a server does: one growing sequence, plain causal attention.

    `fed` are the tokens that each further step reads; None feeds what was drafted.
    """
    embed, layer = model.embed_tokens, model.layers[0]
    hidden = model.fc(row["hidden_states"][: start + 1].float())
    pairs = torch.cat([embed(row["input_ids"][1 : start + 2]), hidden], dim=-1)
    drafted: list[int] = []
    for step in range(STEPS):
        length = len(pairs)
        positions = torch.arange(1, length + 1)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = layer(
            hidden_states=pairs[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=model.rotary_emb(pairs[None], positions),
        )[0, -1]
        draft_id = int(model.lm_head(model.norm(out)).argmax())
        drafted.append(draft_id + int(model.d2t[draft_id]))
        token = torch.tensor(drafted[-1] if fed is None else fed[step])
        pairs = torch.cat([pairs, torch.cat([embed(token), out])[None]])
    return drafted


def test_chains_counted_by_hand() -> None:
    """Two rows of five and four positions and one of padding, K = 2, written out."""
    rows = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, -1])
    supervised = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0, 1, 0]).bool()
    choices = torch.tensor([-1, 11, 12, 13, 14, 21, 22, -1, 24, -1])
    first = torch.tensor([99, 11, 12, 99, 14, 21, 22, 99, 24, 0])  # judged by choices[i]
    second = torch.tensor([99, 12, 99, 14, 21, 22, 99, 24, 0, 0])  # judged by choices[i + 1]
    # Row 0 has whole windows at 1, 2, 3: (right, right), (right, wrong), (wrong, right does not count).
    # Its window at 4 would end in row 1. Row 1 has one at 5 only: 6 ends unsupervised, 8 in the padding.
    counts = acceptance._count_chains(torch.stack([first, second]), choices, supervised, rows)
    assert counts.tolist() == [[3, 2, 1], [1, 1, 1]]


def test_the_count_equals_a_server_like_chain(model: Eagle3DraftModel, rows: list[Row]) -> None:
    row = rows[0]
    batch = packed([row], 39)
    lm_head = model.embed_tokens.weight  # tied
    norm = model.verifier_norm
    choices = [
        int((norm(state.float()) @ lm_head.T).argmax()) for state in row["verifier_last_hidden_states"]
    ]
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    drafts, accepted, greedy = 0, [0] * STEPS, 0
    for start in range(39 - STEPS + 1):
        if not all(mask[start + 1 : start + 1 + STEPS]):
            continue
        drafts += 1
        fed = [*ids[start + 2 : start + 2 + STEPS], 0]
        drafted = chain(model, row, start, fed)
        for step in range(STEPS):
            if drafted[step] != choices[start + 1 + step]:
                break
            accepted[step] += 1
        if fed[: STEPS - 1] == choices[start + 1 : start + STEPS]:
            # Here the answer is the verifier's own choice, as at temperature 0: the chain that feeds its
            # own tokens is accepted just as far.
            greedy += 1
            own = chain(model, row, start, None)
            agreed = [a == b for a, b in zip(drafted, choices[start + 1 :], strict=False)]
            own_agreed = [a == b for a, b in zip(own, choices[start + 1 :], strict=False)]
            assert [all(agreed[: k + 1]) for k in range(STEPS)] == [
                all(own_agreed[: k + 1]) for k in range(STEPS)
            ]
    counted = acceptance.count_accepted(
        model, batch, acceptance.verifier_choices(model, batch, lm_head), STEPS
    )
    assert drafts > 25
    assert accepted[0] > 3
    assert greedy > 5
    assert counted.tolist() == [[drafts, *accepted]]


def test_packed_rows_count_as_they_do_alone(
    model: Eagle3DraftModel, rows: list[Row], verifier: Verifier
) -> None:
    lm_head = verifier.tensor("lm_head").float()
    batch = packed(rows, 39 * 4 + 20)
    together = acceptance.count_accepted(
        model, batch, acceptance.verifier_choices(model, batch, lm_head), STEPS
    )
    alone = []
    for row in rows:
        single = packed([row], 39)
        choices = acceptance.verifier_choices(model, single, lm_head)
        alone += acceptance.count_accepted(model, single, choices, STEPS).tolist()
    assert together.tolist() == alone
    drafts, *accepted = together.sum(0).tolist()
    found = acceptance.measure_offline(model, [batch], verifier, STEPS)
    assert found == Acceptance(drafts, tuple(accepted))
    assert found.length == pytest.approx(1 + sum(accepted) / drafts)


def test_the_verifier_chooses_over_its_whole_vocabulary(model: Eagle3DraftModel, rows: list[Row]) -> None:
    batch = packed(rows, 39 * 4)
    choices = acceptance.verifier_choices(model, batch, model.embed_tokens.weight)
    mask = batch["loss_mask"][0].bool()
    assert (choices[~mask] == -1).all()
    assert (choices[mask] >= 0).all()
    outside = ~model.t2d[choices[mask]]
    assert 0.02 < outside.float().mean().item() < 0.4  # what a count inside the draft vocabulary would miss


def test_chunks_of_logits_do_not_change_the_choice(
    model: Eagle3DraftModel, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = packed(rows, 39 * 4)
    whole = acceptance.verifier_choices(model, batch, model.embed_tokens.weight)
    monkeypatch.setattr(acceptance, "_LOGIT_BYTES", 7 * 4 * 49152)  # seven positions at a time
    assert torch.equal(whole, acceptance.verifier_choices(model, batch, model.embed_tokens.weight))


def test_the_norm_of_the_choice_has_the_verifiers_epsilon(verifier: Verifier) -> None:
    transformer = drafter.transformer_of(verifier, plain_flags())
    transformer.rms_norm_eps = 1e-6
    config = drafter.new_config(
        transformer, verifier, layer_ids=[2, 15, 27], draft_vocab_size=49152, speculative_tokens=STEPS
    )
    model = drafter.build(config, DraftVocab.full(49152), verifier)
    assert model.norm.variance_epsilon == 1e-6
    assert model.verifier_norm.variance_epsilon == 1e-5


def test_json_of_an_acceptance_reads_back() -> None:
    found = Acceptance(717, (54, 3, 0))
    assert found.as_json() == {
        "acceptance_length": pytest.approx(1.0794979),
        "by_position": [pytest.approx(0.0753138), pytest.approx(0.0041841), 0.0],
        "drafts": 717,
    }
    assert Acceptance.from_json(found.as_json()) == found
