"""Stage 03: what it stores is right, what is wrong stops it early, and a rerun only does what is missing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common import dataset, manifest
from common.capture import Capture, Rows, verify
from common.capture_transformers import TransformersBackend, batches
from common.capture_vllm import VllmBackend
from common.content_check import ContentCheck
from common.errors import InputError, StageError
from common.hidden_states import CaptureRow, Check, HiddenStateStore, Outcome
from common.inference_pool import InferencePool
from common.store_forms import StoreForm
from common.verifier import Verifier
from tests.conftest import ROOT, load_script
from tests.faulty_server import FaultyServer
from tests.reference_states import TEXTS, relative_errors, write_rows
from tests.tiny_verifiers import DEEPSEEK_IDS, DEEPSEEK_LAYERS, save_deepseek_v3, save_kimi_k25

H = 128


def stage(*arguments: str | Path) -> int:
    return load_script("03_capture_hidden").main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tiny(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deepseek_v3(tmp_path_factory.mktemp("tiny") / "deepseek", verifier_dir)


@pytest.fixture
def here(tiny: Path, run_dir: Path) -> Sequence[str | Path]:
    """Arguments of a run over `TEXTS` in this process."""
    write_rows(run_dir / "dataset", tiny)
    ids = map(str, DEEPSEEK_IDS)
    return ["--run-dir", run_dir, "--verifier", tiny, "--backend", "transformers", "--layer-ids", *ids]


@pytest.fixture
def states(run_dir: Path) -> Path:
    return run_dir / "hidden_states"


# --------------------------------------------------------------------------------------------------------
# Right


def test_states_computed_here_equal_transformers_own_for_latent_attention_and_experts(
    here: Sequence[str | Path], states: Path, tiny: Path, run_dir: Path
) -> None:
    assert stage(*here, "--dtype", "float32") == 0
    rows = [row["input_ids"].tolist() for row in dataset.load(run_dir / "dataset")]
    assert max(relative_errors(HiddenStateStore(states, H), rows, tiny, DEEPSEEK_IDS)) < 1e-2


def test_states_computed_here_equal_transformers_own_for_smollm2(
    verifier_dir: Path, run_dir: Path, states: Path
) -> None:
    rows = write_rows(run_dir / "dataset", verifier_dir)
    assert stage("--run-dir", run_dir, "--verifier", verifier_dir, "--backend", "transformers") == 0
    assert max(relative_errors(HiddenStateStore(states, 576), rows, verifier_dir, [2, 15, 27])) < 5e-2
    facts = manifest.read(states, "03").facts
    assert (facts["layer_ids"], facts["final_layer_id"], facts["pre_norm"]) == ([2, 15, 27], 30, True)


def test_a_language_model_nested_as_kimis_gives_the_states_of_its_own(
    tiny: Path, run_dir: Path, states: Path
) -> None:
    kimi = save_kimi_k25(run_dir / "kimi", tiny)
    rows = write_rows(run_dir / "dataset", kimi)
    arguments = ["--run-dir", run_dir, "--verifier", kimi, "--backend", "transformers", "--dtype", "float32"]
    assert stage(*arguments, "--layer-ids", *map(str, DEEPSEEK_IDS)) == 0
    assert max(relative_errors(HiddenStateStore(states, H), rows, tiny, DEEPSEEK_IDS)) < 1e-2
    facts = manifest.read(states, "03").facts
    assert (facts["layer_ids"], facts["final_layer_id"]) == (DEEPSEEK_IDS, DEEPSEEK_LAYERS)


def test_speculators_data_set_reads_the_run_folder(
    here: Sequence[str | Path], states: Path, run_dir: Path
) -> None:
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    assert stage(*here) == 0
    data = ArrowDataset(512, run_dir / "dataset", FileTransfer(states), on_missing="raise")
    sample = data[1]
    assert sample["hidden_states"].shape[-1] == 3 * H
    assert sample["verifier_last_hidden_states"].shape[-1] == H


def test_a_data_set_of_speculators_own_needs_only_a_verifier(tiny: Path, run_dir: Path, states: Path) -> None:
    import datasets

    rows = {"input_ids": [list(range(30)), list(range(20))], "loss_mask": [[1] * 30, [1] * 20]}
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(run_dir / "foreign")
    ids = map(str, DEEPSEEK_IDS)
    arguments = ["--run-dir", run_dir, "--dataset", run_dir / "foreign", "--backend", "transformers"]
    assert stage(*arguments, "--layer-ids", *ids) == 2
    assert stage(*arguments, "--verifier", tiny, "--layer-ids", *map(str, DEEPSEEK_IDS)) == 0
    assert HiddenStateStore(states, H).done({0: 30, 1: 20}) == {0, 1}


class Spoiling(TransformersBackend):
    """Hands out states as a mistaken server would."""

    spoil = staticmethod(lambda states: states)

    def _forward(self, batch: list[CaptureRow], predict: bool):  # type: ignore[no-untyped-def]
        found = super()._forward(batch, predict)
        return [(row, self.spoil(states.clone()), said) for row, states, said in found]


def capture(
    backend: object, rows: Rows, store: HiddenStateStore, content: ContentCheck, rate: float = 0.0
) -> Capture:
    run = Capture(rows, store, content, rate)
    asyncio.run(run.run(nullcontext(backend), sorted(rows.lengths)))  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize("mistake", ["layer", "norm", "shift"])
def test_a_wrong_last_state_stops_the_run_at_the_first_rows(
    verifier_dir: Path, run_dir: Path, states: Path, mistake: str
) -> None:
    write_rows(run_dir / "dataset", verifier_dir)
    rows, verifier = Rows.load(run_dir / "dataset"), Verifier(str(verifier_dir))
    store, content = HiddenStateStore(states, 576), ContentCheck.of(verifier)
    ids = [2, 15, 27, 29 if mistake == "layer" else 30]
    backend = Spoiling(verifier, store, ids, torch.bfloat16, 2048)

    def normed(states: torch.Tensor) -> torch.Tensor:
        last = states[:, -1].float()
        states[:, -1] = last * (last.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * content.norm
        return states

    spoils = {"layer": lambda s: s, "norm": normed, "shift": lambda s: s.roll(1, 0)}
    words = {"layer": "another layer", "norm": "final norm applied", "shift": "shifted by one"}
    backend.spoil = spoils[mistake]  # type: ignore[method-assign]
    with pytest.raises(StageError, match=f"the rest was not sent.*{words[mistake]}"):
        capture(backend, rows, store, content)
    assert not list(states.glob("hs_*"))


# --------------------------------------------------------------------------------------------------------
# Small


def test_a_packed_fp8_store_is_what_its_manifest_says(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = [*here, "--store-dtype", "fp8", "--compress", "zstd"]
    assert stage(*packed) == 0
    shown = capsys.readouterr().err
    assert "at most (4 states x (H 128 x 1 B + 4 B of scale) + 8 B of token id) before zstd" in shown
    assert "of plain bfloat16" in shown
    made = manifest.read(states, "03")
    assert (made.facts["store_dtype"], made.facts["compress"]) == ("fp8", "zstd")
    assert made.counts["bytes"] < 0.55 * made.counts["tokens"] * (4 * H * 2)
    store = HiddenStateStore.made_with(made.facts, states, H)
    assert store.form == StoreForm("fp8", "zstd")
    assert stage(*packed, "--verify") == 0
    content = bytearray(store.path(1).read_bytes())
    content[-1000] ^= 1
    store.path(1).write_bytes(content)
    assert stage(*packed, "--verify") == 1
    assert "1 of 4 files are damaged" in capsys.readouterr().err
    # By other flags all four would look damaged, and be named for deletion.
    assert stage(*here, "--verify", "--trim") == 2
    shown = capsys.readouterr().err
    assert "--store-dtype was 'fp8', now 'bfloat16'" in shown
    assert "--trim was None, now True" in shown


def test_a_store_begun_in_one_form_is_not_continued_in_another(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(*here, "--store-dtype", "mixed") == 0
    capsys.readouterr()
    assert stage(*here, "--compress", "zstd") == 2
    shown = capsys.readouterr().err
    assert "--store-dtype was 'mixed', now 'bfloat16'" in shown
    assert "--compress was 'none', now 'zstd'" in shown
    assert HiddenStateStore(states, H, form=StoreForm("mixed")).read(0)[1].shape[1:] == (4, H)


# --------------------------------------------------------------------------------------------------------
# Refused before anything is written


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("1 3", "three different ids"),
        ("1 3 5 7", "three different ids"),
        ("3 1 5", "ascending"),
        ("1 3 6", "always captured beside the three"),
        ("1 3 9", "from 1 to 5"),
        ("0 2 4", "add one to each"),
    ],
)
def test_layer_ids_that_would_mean_something_else_are_refused(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str], ids: str, words: str
) -> None:
    assert stage(*here[:-4], "--layer-ids", *ids.split()) == 2
    assert words in capsys.readouterr().err
    assert not states.exists()


def test_a_store_larger_than_allowed_is_refused_with_its_formula(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(*here, "--max-disk", "0.0001") == 2
    shown = capsys.readouterr().err
    assert "4 states x H 128 x 2 B" in shown
    assert "--max-disk allows 100kB" in shown
    assert not list(states.glob("hs_*"))


def test_a_disk_that_is_too_small_is_refused(
    tiny: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(run_dir / "dataset", tiny, TEXTS * 20)
    small = run_dir / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        arguments = ["--run-dir", small, "--dataset", run_dir / "dataset", "--verifier", tiny]
        assert stage(*arguments, "--backend", "transformers", "--layer-ids", "1", "3", "5") == 2
        assert "are still to be written and" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "vllm"], "pass --serve"),
        (["--backend", "vllm", "--serve", "--dtype", "float32"], "--dtype is for --backend transformers"),
        (["--backend", "vllm", "--serve", "--server-args", "-pp 2"], "--tensor-parallel-size"),
        (["--backend", "vllm", "--serve", "--server-args=--enable-prefix-caching"], "would lack its states"),
        (["--backend", "vllm", "--endpoint", "http://127.0.0.1:9"], "does not answer"),
        (["--backend", "vllm", "--serve", "--shared-folder", "/tmp/x"], "belongs to a server of --endpoint"),
        (["--endpoint", "http://127.0.0.1:9"], "leave out --endpoint"),
        (["--dataset", "/nowhere"], "/nowhere does not exist"),
        (["--context", "64"], "pass --trim as well"),
        (["--trim", "--context", "4"], "must be at least 16"),
        (["--trim", "--probe", "8"], "leave out --trim"),
    ],
)
def test_contradictions_are_named(
    here: Sequence[str | Path], capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert stage(*here, *flags) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_stored_nothing_binds_no_settings(here: Sequence[str | Path], states: Path) -> None:
    assert stage(*here, "--backend", "vllm", "--endpoint", "http://127.0.0.1:9") == 2
    assert stage(*here[:-3], "2", "3", "4") == 0
    assert manifest.read(states, "03").facts["layer_ids"] == [2, 3, 4]


def test_an_overwriting_run_that_stores_nothing_leaves_the_old_states(
    here: Sequence[str | Path], states: Path
) -> None:
    assert stage(*here) == 0
    before = {path.name: path.stat().st_mtime_ns for path in states.iterdir() if path.is_file()}
    assert stage(*here, "--overwrite", "--backend", "vllm", "--endpoint", "http://127.0.0.1:9") == 2
    assert {path.name: path.stat().st_mtime_ns for path in states.iterdir()} == before
    assert stage(*here, "--overwrite", "--dtype", "float32") == 0
    assert manifest.read(states, "03").config["dtype"] == "float32"


@pytest.mark.parametrize(
    "flags", ["--concurrency 0", "--probe 0", "--probe -1", "--batch-tokens 0", "--max-failure-rate 1.5"]
)
def test_numbers_out_of_range_are_refused(here: Sequence[str | Path], flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        stage(*here, *flags.split())


def test_rows_that_fill_every_position_are_refused_before_a_server_starts(
    tiny: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(run_dir / "dataset", tiny, ["tea " * 4096])
    ids = map(str, DEEPSEEK_IDS)
    assert stage("--run-dir", run_dir, "--verifier", tiny, "--serve", "--layer-ids", *ids) == 2
    assert "the verifier 4096 positions" in capsys.readouterr().err


def test_the_command_of_a_server_is_shown(
    here: Sequence[str | Path], capsys: pytest.CaptureFixture[str], states: Path
) -> None:
    assert stage(*here, "--backend", "vllm", "--print-server") == 0
    shown = capsys.readouterr().out
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]' in shown
    assert str(states / ".incoming") in shown
    assert "--no-enable-prefix-caching" in shown
    assert not states.exists()


# --------------------------------------------------------------------------------------------------------
# Resumable


def test_a_finished_store_is_recognised_and_a_missing_file_captured_again(
    here: Sequence[str | Path], states: Path
) -> None:
    assert stage(*here) == 0
    kept = (states / "hs_0.safetensors").stat().st_mtime_ns
    (states / "hs_2.safetensors").unlink()
    assert stage(*here) == 0
    assert (states / "hs_2.safetensors").exists()
    assert (states / "hs_0.safetensors").stat().st_mtime_ns == kept
    written = (states / "manifest.json").stat().st_mtime_ns
    assert stage(*here) == 0
    assert (states / "manifest.json").stat().st_mtime_ns == written


def test_other_layers_are_refused_until_overwritten(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(*here) == 0
    other = [*here[:-3], "2", "3", "4"]
    assert stage(*other) == 2
    assert "--layer-ids was [1, 3, 5], now [2, 3, 4]" in capsys.readouterr().err
    assert stage(*other, "--overwrite") == 0
    assert manifest.read(states, "03").facts["layer_ids"] == [2, 3, 4]


def test_a_run_killed_in_the_middle_is_completed_by_the_same_command(
    verifier_dir: Path, run_dir: Path, states: Path
) -> None:
    rows = write_rows(run_dir / "dataset", verifier_dir, TEXTS * 8)
    arguments = ["--run-dir", run_dir, "--verifier", verifier_dir, "--backend", "transformers"]
    arguments += ["--store-dtype", "fp8", "--compress", "zstd"]
    command = [sys.executable, ROOT / "03_capture_hidden.py", *arguments, "--batch-tokens", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while len(list(states.glob("hs_*"))) < 3 and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in states.glob("hs_*")}
    assert 3 <= len(before) < len(rows)
    assert not (states / "manifest.json").exists()
    (states / ".hs_9.safetensors.1.tmp").write_bytes(b"torn")
    assert stage(*arguments) == 0
    assert {name: (states / name).stat().st_mtime_ns for name in before} == before
    assert manifest.read(states, "03").counts["written"] == len(rows)
    assert not list(states.glob(".*.tmp"))
    assert stage(*arguments, "--verify") == 0


def test_a_disk_that_fills_up_during_the_run_stops_it_and_the_same_command_completes_it(
    tiny: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(run_dir / "dataset", tiny, TEXTS * 20)
    small = run_dir / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        # Just enough by the formula, which does not know that a file of 70 kB takes whole pages.
        store = HiddenStateStore(small / "hidden_states", H)
        needed = store.bytes_of({row: len(ids) for row, ids in enumerate(rows)})
        (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free - needed - 8192))
        arguments = ["--run-dir", small, "--dataset", run_dir / "dataset", "--verifier", tiny]
        arguments += ["--backend", "transformers", "--layer-ids", "1", "3", "5"]
        assert stage(*arguments) == 1
        assert "the disk is full" in capsys.readouterr().err
        there = {path.name: path.stat().st_mtime_ns for path in store.folder.glob("hs_*")}
        assert 40 < len(there) < 80
        assert len(store.done({row: len(ids) for row, ids in enumerate(rows)})) == len(there)
        assert not list(store.folder.glob(".*.tmp"))
        (small / "filler").unlink()
        assert stage(*arguments) == 0
        assert manifest.read(store.folder, "03").counts["written"] == 80
        assert {name: (store.folder / name).stat().st_mtime_ns for name in there} == there
        assert stage(*arguments, "--verify") == 0
    finally:
        subprocess.run(["umount", small], check=True)


class Scripted:
    """A backend whose states say each row's next token, except where it is told otherwise.

    Args:
        store: where they go.
        fail: row -> how often it fails.
        mute: rows whose states say something else than the verifier.
        unlikely: rows of whose tokens verifier and states say none.
        right: rows after which its states are wrong at every other position, as a server's that was started
            again with another last layer.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        fail: dict[int, int],
        mute: frozenset[int] = frozenset(),
        unlikely: frozenset[int] = frozenset(),
        right: int = 10_000,
    ) -> None:
        self.store, self.fail, self.mute, self.unlikely, self.right = store, fail, mute, unlikely, right
        self.order: list[int] = []

    async def capture(
        self, rows: Iterable[CaptureRow], check: Check | None, *, predict: bool = False
    ) -> AsyncIterator[tuple[CaptureRow, Outcome]]:
        for row in rows:
            self.order.append(len(row.token_ids))
            if self.fail.get(row.index, 0) > 0:
                self.fail[row.index] -= 1
                yield row, StageError("the server hiccuped")
                continue
            said = row.token_ids.roll(-1)
            if row.index in self.unlikely:
                said = (said + 1) % 16
            states = torch.ones(len(row.token_ids), 4, 16)
            states[:, -1] = 20 * torch.eye(16)[said]
            if row.index in self.mute:
                states[:, -1] = states[:, -1].roll(1, 1)
            if len(self.order) > self.right:
                other = torch.arange(len(states)).flip(0) % 2 == 1
                states[other, -1] = states[other, -1].roll(1, 1)
            try:
                if check is not None:
                    said[: 0 if predict else -1] = -1
                    check(row, states.bfloat16(), said)
            except StageError as error:
                yield row, error
                continue
            self.store.write(row.index, row.token_ids, states)
            yield row, None


@pytest.fixture
def scripted(tmp_path: Path) -> tuple[Rows, HiddenStateStore, ContentCheck]:
    """A hundred rows of 20 to 119 tokens out of sixteen, and a head that reads them."""
    import datasets

    ids = [[(position * 5 + row) % 16 for position in range(20 + row)] for row in range(100)]
    masks = [[1] * len(row) for row in ids]
    datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).save_to_disk(tmp_path / "rows")
    (tmp_path / "states").mkdir()
    store = HiddenStateStore(tmp_path / "states", 16)
    return Rows.load(tmp_path / "rows"), store, ContentCheck(torch.ones(16), torch.eye(16), 1e-6)


def capturing(shared: Path, body: dict[str, Any]) -> dict[str, Any]:
    """What a capturing vLLM answers and writes; each token's successor is the token behind it."""
    ids = torch.tensor(body["prompt"])
    states = torch.ones(len(ids), 4, 16)
    states[:, -1] = 20 * torch.eye(16)[(ids + 5) % 16]
    file = shared / f"{uuid.uuid4()}.safetensors"
    save_file({"hidden_states": states.bfloat16(), "token_ids": ids}, file)
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
    if body.get("return_token_ids"):
        choice["token_ids"] = [(body["prompt"][-1] + 5) % 16]
    if body.get("prompt_logprobs"):
        choice["prompt_logprobs"] = [None, *({str(token): {"rank": 1}} for token in body["prompt"][1:])]
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": body["model"],
        "choices": [choice],
        "kv_transfer_params": {"hidden_states_path": str(file), "layer_ids": [1, 2, 3, 4]},
    }


async def fill(
    server: FaultyServer, rows: Rows, store: HiddenStateStore, content: ContentCheck | None
) -> Capture:
    async with InferencePool([server.url], concurrency=4) as pool:
        backend = VllmBackend(pool, "stub", store, store.folder / ".incoming", [1, 2, 3, 4], ["vllm"])
        work = Capture(rows, store, content, 0.0)
        await work.run(nullcontext(backend), list(rows.lengths))
    return work


async def test_a_server_that_restarts_in_the_middle_costs_no_row(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    store = replace(store, form=StoreForm("mixed", "zstd"))
    shared = store.folder / ".incoming"
    shared.mkdir()

    def restart() -> None:
        while server.answered < 20:
            time.sleep(0.001)
        server.stop()
        (shared / "half.safetensors").write_bytes(b"half")
        time.sleep(0.2)
        server.start()

    with FaultyServer(answer=partial(capturing, shared)) as server:
        thread = threading.Thread(target=restart)
        thread.start()
        work = await fill(server, rows, store, content)
        thread.join()
        assert len(server.bodies) >= 100
        for body in server.bodies:
            # Greedy is the most likely token only without the penalties of a model's generation config.
            assert (body["temperature"], body["repetition_penalty"]) == (0.0, 1.0)
            assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)
    counts = work.counts()
    assert (counts["written"], counts["failed"]) == (100, 0)
    for row in range(100):
        assert torch.equal(store.read(row)[0], rows[row].token_ids)


async def test_a_server_that_does_not_name_its_token_is_refused_unless_nothing_is_checked(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    shared = store.folder / ".incoming"
    shared.mkdir()

    def silent(body: dict[str, Any]) -> dict[str, Any]:
        return capturing(shared, body | {"return_token_ids": False})

    with FaultyServer(answer=silent) as server:
        with pytest.raises(InputError, match=r"return_token_ids.*--no-content-check"):
            await fill(server, rows, store, content)
        assert not list(store.folder.glob("hs_*"))
        assert (await fill(server, rows, store, None)).counts()["written"] == 100
        assert "return_token_ids" not in server.bodies[-1]


async def test_of_a_long_row_in_doubt_the_server_is_asked_about_its_beginning(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import capture_vllm

    rows, store, content = scripted
    shared = store.folder / ".incoming"
    shared.mkdir()
    monkeypatch.setattr(capture_vllm, "MOST_LOGITS", 64)
    found = []
    with FaultyServer(answer=partial(capturing, shared)) as server:
        async with InferencePool([server.url], concurrency=4) as pool:
            backend = VllmBackend(pool, "stub", store, shared, [1, 2, 3, 4], ["vllm"])

            def check(row: CaptureRow, states: torch.Tensor, said: torch.Tensor) -> None:
                found.append((len(row.token_ids), (said >= 0).nonzero()[:, 0].tolist()))
                assert content.compare(row, states, said) == 1.0

            async for _, error in backend.capture([rows[99], rows[40]], check, predict=True):
                assert error is None
        asked = sorted((len(body["prompt"]), "prompt_logprobs" in body) for body in server.bodies)
    assert sorted(found) == [(60, list(range(60))), (119, [*range(64), 118])]
    assert asked == [(60, True), (64, True), (119, False)]
    assert not list(shared.iterdir())


def test_rows_that_fail_once_are_tried_again(scripted: tuple[Rows, HiddenStateStore, ContentCheck]) -> None:
    rows, store, content = scripted
    counts = capture(Scripted(store, {40: 1, 50: 1}), rows, store, content).counts()
    assert (counts["read"], counts["written"], counts["failed"]) == (100, 100, 0)


def test_rows_that_keep_failing_are_listed_with_their_reason(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    counts = capture(Scripted(store, {40: 9}), rows, store, content, rate=0.01).counts()
    assert (counts["read"], counts["written"], counts["failed"]) == (100, 99, 1)
    assert counts["failures"] == {"40": "StageError: the server hiccuped"}


def test_more_failures_than_allowed_are_an_error(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    run = capture(Scripted(store, {40: 9, 41: 9}), rows, store, content, rate=0.01)
    with pytest.raises(StageError, match="2 of 100 rows failed"):
        run.counts()


def test_a_run_in_which_everything_fails_stops_early(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    backend = Scripted(store, dict.fromkeys(range(50, 100), 9))
    with pytest.raises(StageError, match="13 of 100 rows failed"):
        capture(backend, rows, store, content, rate=0.01)
    assert len(backend.order) == 8 + 13


def test_a_row_whose_states_the_verifier_refutes_fails(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    counts = capture(Scripted(store, {}, frozenset({60})), rows, store, content, rate=0.01).counts()
    assert counts["failures"]["60"].startswith("content: row 60: norm and lm_head of the last state give the")
    assert "at 0% of 80 positions" in counts["failures"]["60"]
    # The same command tries it again and comes to the same end, not to a store that is never finished.
    again = Capture(rows, store, content, 0.01)
    asyncio.run(again.run(nullcontext(Scripted(store, {}, frozenset({60}))), [60]))  # type: ignore[arg-type]
    assert list(again.counts()["failures"]) == ["60"]


def test_rows_in_doubt_are_kept_where_the_verifier_confirms_them(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck], caplog: pytest.LogCaptureFixture
) -> None:
    rows, store, content = scripted
    # A third of the rows has tokens of which the verifier would have chosen none, as in foreign answers.
    backend = Scripted(store, {}, unlikely=frozenset(range(60, 93)))
    counts = capture(backend, rows, store, content).counts()
    assert (counts["written"], counts["failed"]) == (100, 0)
    assert 8 <= len(backend.order) - 100 <= 33 + 2 * 5  # once more, and two of the first rows with each eight


def test_a_server_that_comes_back_with_other_states_stops_the_run_and_leaves_none_of_them(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import capture as module

    rows, store, content = scripted
    monkeypatch.setattr(module, "_UNPROVEN", 20)
    # 8 first rows, then twice 20 rows and 2 of the first again: what comes after is wrong.
    backend = Scripted(store, {}, right=8 + 22 + 22)
    with pytest.raises(
        StageError, match=r"are not any more.*other flags.*at 52% of 21 positions.*The 20 rows"
    ):
        capture(backend, rows, store, content, rate=0.01)
    assert store.done(rows.lengths) == {*range(8), *range(60, 100)}


def test_without_a_content_check_every_row_is_taken(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, _ = scripted
    backend = Scripted(store, {40: 1}, frozenset({60}))
    work = Capture(rows, store, None, 0.0)
    asyncio.run(work.run(nullcontext(backend), list(rows.lengths)))  # type: ignore[arg-type]
    assert work.counts()["written"] == 100
    assert len(backend.order) == 101


def test_the_shortest_rows_go_first_as_a_check_and_then_the_longest(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    backend = Scripted(store, {})
    capture(backend, rows, store, content)
    assert backend.order[:8] == [27, 26, 25, 24, 23, 22, 21, 20]
    assert backend.order[8:] == [*range(119, 27, -1), 21, 20]  # at the end two of the first ones once more


def test_batches_hold_rows_times_the_longest_within_the_limit() -> None:
    def row(length: int) -> CaptureRow:
        return CaptureRow(0, torch.zeros(length, dtype=torch.int64), torch.zeros(length))

    def shapes(lengths: Sequence[int], limit: int) -> list[list[int]]:
        found: Iterator[list[CaptureRow]] = batches(map(row, lengths), limit)
        return [[len(row.token_ids) for row in batch] for batch in found]

    assert shapes([50, 40, 30, 10, 10], 100) == [[50, 40], [30, 10, 10]]
    assert shapes([500, 40], 100) == [[500], [40]]
    assert shapes([], 100) == []


# --------------------------------------------------------------------------------------------------------
# Less than everything


def tailed(run_dir: Path, tiny: Path) -> list[list[int]]:
    """`TEXTS` with five tokens of tail behind the supervised ones, and a row that has none of these."""
    rows = write_rows(run_dir / "plain", tiny)
    masks = [[0] * 6 + [1] * (len(ids) - 11) + [0] * 5 for ids in rows]
    masks[1] = [0] * len(rows[1])
    dataset.write(
        run_dir / "dataset",
        (
            {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), "id": f"{row}#0", "source": "test"}
            for row, (ids, mask) in enumerate(zip(rows, masks, strict=True))
        ),
    )
    return rows


def test_trimmed_states_are_those_of_the_whole_rows(
    here: Sequence[str | Path], states: Path, tiny: Path, run_dir: Path
) -> None:
    shutil.rmtree(run_dir)
    rows = tailed(run_dir, tiny)
    assert stage(*here) == 0
    whole = [HiddenStateStore(states, H).read(row)[1] for row in range(4)]
    assert stage(*here, "--overwrite", "--trim", "--context", "16") == 0
    for number, row in enumerate((0, 2, 3)):  # the first supervised token is the seventh: nothing to cut
        ids, trimmed = HiddenStateStore(states, H).read(number)
        assert ids.tolist() == rows[row][:-5]
        assert torch.allclose(trimmed.float(), whole[row][:-5].float(), rtol=0.02, atol=0.02)
    made = manifest.read(states, "03")
    assert (made.counts["read"], made.counts["written"]) == (4, 3)
    assert made.counts["dropped"] == {"no_supervised_token": 1}
    assert (
        made.counts["tokens"] == made.counts["trimmed"]["written"] == sum(map(len, rows)) - len(rows[1]) - 15
    )
    assert stage(*here, "--trim", "--context", "16", "--verify") == 0
    kept = (states / "rows" / "manifest.json").stat().st_mtime_ns
    (states / "hs_1.safetensors").unlink()
    assert stage(*here, "--trim", "--context", "16") == 0
    assert (states / "hs_1.safetensors").exists()
    assert (states / "rows" / "manifest.json").stat().st_mtime_ns == kept


def test_context_is_computed_with_all_that_stands_before_it(
    here: Sequence[str | Path], states: Path, tiny: Path, run_dir: Path
) -> None:
    shutil.rmtree(run_dir)
    rows = write_rows(run_dir / "dataset", tiny, [TEXTS[3] * 2])  # the first quarter is its prompt
    assert stage(*here) == 0
    whole = HiddenStateStore(states, H).read(0)[1]
    assert stage(*here, "--overwrite", "--trim", "--context", "16") == 0
    ids, part = HiddenStateStore(states, H).read(0)
    start = len(rows[0]) // 4 - 16
    assert start > 16
    assert ids.tolist() == rows[0][start:]
    assert torch.equal(part, whole[start:])
    assert stage(*here, "--trim", "--context", "16", "--verify") == 0


def test_conversations_that_fit_are_taken_and_stay_chosen(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(*here, "--max-disk", "0.0003") == 2
    assert "take fewer rows (--fit-disk" in capsys.readouterr().err
    few = ["--max-disk", "0.0003", "--fit-disk"]
    # What was chosen for a run that stored nothing binds none.
    fewer = ["--max-disk", "0.00025", "--fit-disk", "--backend", "vllm", "--endpoint", "http://127.0.0.1:9"]
    assert stage(*here, *fewer) == 2
    assert "fit disk: 2 of 4 rows" in capsys.readouterr().err
    assert stage(*here, *few) == 0
    made = manifest.read(states, "03")
    # By the hash of their ids: 3 (4e07...), 0 (5fec...), 1 (6b86...), and 2 (d473...) finds no room.
    assert dataset.load(states / "rows").with_format(None)["row"] == [0, 1, 3]
    assert made.counts["dropped"] == {"no_supervised_token": 0, "no_space": 1}
    assert made.counts["bytes"] < 300_000
    # More room changes nothing any more.
    assert stage(*here, "--max-disk", "1", "--fit-disk") == 0
    assert manifest.read(states, "03").counts["written"] == 3
    assert stage(*here, "--max-disk", "1") == 2
    assert "--fit-disk was True, now None" in capsys.readouterr().err
    assert stage(*here, "--max-disk", "0.00001", "--fit-disk", "--overwrite") == 2
    assert "not one conversation" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------
# Verify


def test_verify_finds_a_flipped_file_and_names_it(
    here: Sequence[str | Path], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    assert stage(*here) == 0
    assert stage(*here, "--verify") == 0
    tensors = load_file(states / "hs_1.safetensors")
    tensors["hidden_states"][3, 0, 5] = float("nan")
    save_file(tensors, states / "hs_1.safetensors")
    capsys.readouterr()
    assert stage(*here, "--verify") == 1
    shown = capsys.readouterr().err
    assert "1 of 4 files are damaged" in shown
    assert "state 0 at position 3" in shown


def test_a_verifier_that_says_something_else_is_noticed_unless_few_rows_were_counted(
    scripted: tuple[Rows, HiddenStateStore, ContentCheck],
) -> None:
    rows, store, content = scripted
    counts = capture(Scripted(store, {}), rows, store, content).counts()
    assert counts["content"]["hits"] == counts["content"]["looked_at"] == 1600
    verify(rows, store, content, counts)
    other = replace(content, lm_head=content.lm_head.roll(1, 0))
    with pytest.raises(StageError, match=r"predict 0.0% of the supervised tokens, 100.0% when they were"):
        verify(rows, store, other, counts)
    # As after a rerun that had one row to do, which is a hard one.
    verify(rows, store, content, counts | {"content": {"hits": 5, "looked_at": 16}})


def test_verify_of_nothing_says_what_to_run(
    here: Sequence[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(*here, "--verify") == 2
    assert "Run `03_capture_hidden.py` first" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------
# What a server says is not believed


@pytest.fixture
def vllm_backend(tmp_path: Path) -> VllmBackend:
    (tmp_path / "shared" / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "shared" / "way-out").symlink_to(tmp_path / "outside")
    store = HiddenStateStore(tmp_path, H)
    pool = InferencePool(["http://127.0.0.1:9/v1"], concurrency=1)
    return VllmBackend(pool, "m", store, tmp_path / "shared", [1, 3, 5, 6], ["python", "-m", "vllm"])


def named(path: str | Path, layer_ids: Sequence[int] = (1, 3, 5, 6)) -> dict[str, object]:
    return {"kv_transfer_params": {"hidden_states_path": str(path), "layer_ids": list(layer_ids)}}


def test_files_in_the_shared_folder_are_read(vllm_backend: VllmBackend, tmp_path: Path) -> None:
    for name in ("a.safetensors", "sub/b.safetensors", "sub/../c.safetensors"):
        found = vllm_backend._server_file(named(tmp_path / "shared" / name))
        assert found == (tmp_path / "shared" / name).resolve()


@pytest.mark.parametrize(
    "name", ["../outside/a.safetensors", "way-out/a.safetensors", "/etc/passwd", "..", ""]
)
def test_paths_outside_the_shared_folder_are_not_read(
    vllm_backend: VllmBackend, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InputError, match="outside the shared folder"):
        vllm_backend._server_file(named(tmp_path / "shared" / name))


def test_a_server_that_captures_other_layers_is_refused(vllm_backend: VllmBackend, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"captures the layers \[2, 3, 4, 6\], this run wants \[1, 3, 5, 6\]"
    ):
        vllm_backend._server_file(named(tmp_path / "shared" / "a.safetensors", [2, 3, 4, 6]))


def test_a_server_that_does_not_capture_is_refused_with_the_command_that_does(
    vllm_backend: VllmBackend,
) -> None:
    with pytest.raises(InputError, match=r"hands out no hidden states.*\npython -m vllm"):
        vllm_backend._server_file({"kv_transfer_params": None})


def test_counts_and_facts_reconcile_in_the_manifest(
    here: Sequence[str | Path], states: Path, run_dir: Path
) -> None:
    assert stage(*here) == 0
    record = json.loads((states / "manifest.json").read_text())
    assert record["counts"]["read"] == record["counts"]["written"] == len(TEXTS)
    assert record["counts"]["bytes"] == sum(path.stat().st_size for path in states.glob("hs_*"))
    assert record["inputs"]["dataset"] == manifest.fingerprint(run_dir / "dataset")
    assert record["facts"]["final_layer_id"] == DEEPSEEK_LAYERS
