"""Manifests: written last, checked against settings and inputs, never mixed, and they add up."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from common import atomic_io, manifest
from common.errors import InputError, StageError
from common.manifest import Manifest

SCRIPT = "03_capture_hidden.py"


def record(inputs: dict[str, str] | None = None, **config) -> Manifest:
    return Manifest("03_capture_hidden", config or {"layer_ids": [2, 15, 27]}, inputs or {})


def begin(folder: Path, made: Manifest, *, overwrite: bool = False, accept_stale: bool = False) -> bool:
    return manifest.begin(folder, made, overwrite=overwrite, accept_stale=accept_stale)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hidden_states"


# ----------------------------------------------------------------------------------------------------------
# Fresh, resumed, done, refused


def test_a_stage_works_until_its_manifest_is_written(folder: Path) -> None:
    assert begin(folder, record())
    (folder / "hs_0.safetensors").write_text("a row")
    assert begin(folder, record()), "a begun folder is resumed"
    assert (folder / "hs_0.safetensors").exists()
    with pytest.raises(InputError, match=r"is not finished \(no manifest.json\). Run `03_capture_hidden.py`"):
        manifest.read(folder, SCRIPT)
    record().write(folder)
    assert not begin(folder, record())
    assert sorted(p.name for p in folder.iterdir()) == ["hs_0.safetensors", "manifest.json"]


def test_other_settings_are_refused_in_a_begun_and_in_a_finished_folder(folder: Path) -> None:
    begin(folder, record(layer_ids=[2, 15, 27], dtype="bf16"))
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            begin(folder, record(layer_ids=[3, 16, 28], dtype="bf16"))
        assert str(refused.value) == (
            f"{folder} was made by 03_capture_hidden with other settings: --layer-ids was [2, 15, 27], now "
            "[3, 16, 28]. Pass --overwrite to make it again, or another --run-dir to keep both."
        )
        record(layer_ids=[2, 15, 27], dtype="bf16").write(folder)


def test_a_tuple_among_the_settings_is_the_list_that_json_makes_of_it(folder: Path) -> None:
    begin(folder, record(layer_ids=(2, 15, 27)))
    assert begin(folder, record(layer_ids=(2, 15, 27)))


def test_a_folder_of_another_stage_is_refused(folder: Path) -> None:
    Manifest("01_prepare_data", {"layer_ids": [2, 15, 27]}).write(folder)
    with pytest.raises(InputError, match=r"was made by 01_prepare_data.py, and 03_capture_hidden.py would"):
        begin(folder, record())


def test_a_changed_input_is_refused_in_a_begun_and_in_a_finished_folder(folder: Path) -> None:
    begin(folder, record({"dataset": "aaaa", "vocab": "cccc"}))
    for _ in range(2):
        with pytest.raises(InputError, match=r"was made from another version of dataset. .*--accept-stale"):
            begin(folder, record({"dataset": "bbbb", "vocab": "cccc"}))
        record({"dataset": "aaaa", "vocab": "cccc"}).write(folder)


def test_an_accepted_stale_input_is_recorded_also_after_a_second_crash(folder: Path) -> None:
    begin(folder, record({"dataset": "aaaa"}))
    assert begin(folder, record({"dataset": "bbbb"}), accept_stale=True)
    resumed = record({"dataset": "bbbb"})
    assert begin(folder, resumed)
    resumed.write(folder)
    assert manifest.read(folder, SCRIPT).accepted_stale == ["dataset"]
    assert manifest.read(folder, SCRIPT).inputs == {"dataset": "bbbb"}


def test_accepting_a_stale_finished_folder_leaves_its_fingerprint(folder: Path) -> None:
    record({"dataset": "aaaa"}).write(folder)
    before = manifest.fingerprint(folder)
    assert not begin(folder, record({"dataset": "bbbb"}), accept_stale=True)
    assert manifest.fingerprint(folder) == before


def test_overwrite_replaces_everything_but_the_lock_that_is_held(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with atomic_io.locked(folder):
        record(layer_ids=[1]).write(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        (folder / "link").symlink_to(outside)
        assert begin(folder, record(), overwrite=True)
        manifest.drop_replaced(folder)
        assert sorted(p.name for p in folder.iterdir()) == [".lock", ".lock-holder", ".started.json"]
        with pytest.raises(StageError, match="is locked"), atomic_io.locked(folder):
            pass
    assert (outside / "precious").exists()


def test_what_was_to_be_replaced_comes_back_when_the_new_run_is_abandoned(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    (folder / "hs_0.safetensors").write_text("old")
    for layer_ids in ([2], [3]):  # the second after a crash of the first
        assert begin(folder, record(layer_ids=layer_ids), overwrite=True)
        assert not (folder / "hs_0.safetensors").exists()
        (folder / "hs_0.safetensors").write_text("new")
    manifest.abandon(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["hs_0.safetensors", "manifest.json"]
    assert (folder / "hs_0.safetensors").read_text() == "old"
    assert not begin(folder, record(layer_ids=[1]))


def test_a_begun_run_that_comes_back_still_binds_its_settings(folder: Path) -> None:
    begin(folder, record(layer_ids=[1]))
    (folder / "hs_0.safetensors").write_text("old")
    assert begin(folder, record(layer_ids=[2]), overwrite=True)
    manifest.abandon(folder)
    with pytest.raises(InputError, match=r"--layer-ids was \[1\], now \[2\]"):
        begin(folder, record(layer_ids=[2]))
    assert begin(folder, record(layer_ids=[1]))


def test_what_was_put_aside_before_a_kill_counts_as_room(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    (folder / "hs_0.safetensors").write_bytes(bytes(1000))
    assert manifest.bytes_to_replace(folder) == 0
    size = (folder / "manifest.json").stat().st_size
    begin(folder, record(layer_ids=[2]), overwrite=True)
    assert manifest.bytes_to_replace(folder) == 1000 + size


def test_what_was_replaced_goes_when_the_new_output_is_complete(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    begin(folder, record(layer_ids=[2]), overwrite=True)
    record(layer_ids=[2]).write(folder)
    assert [p.name for p in folder.iterdir()] == ["manifest.json"]


def test_a_move_aside_that_was_interrupted_is_taken_back(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    (folder / ".replaced").mkdir()
    (folder / "manifest.json").rename(folder / ".replaced" / "manifest.json")
    assert not begin(folder, record(layer_ids=[1]))
    assert [p.name for p in folder.iterdir()] == ["manifest.json"]


def test_a_refusal_writes_nothing(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(InputError):
        begin(folder, record())
    assert [p.name for p in folder.iterdir()] == ["manifest.json"]
    assert (folder / "manifest.json").read_bytes() == before


def test_an_abandoned_folder_takes_any_other_settings(folder: Path) -> None:
    begin(folder, record(layer_ids=[1]))
    manifest.abandon(folder)
    assert begin(folder, record())


def test_a_reopened_folder_is_resumed_and_keeps_its_check(folder: Path) -> None:
    record(layer_ids=[1]).write(folder)
    manifest.reopen(folder)
    assert begin(folder, record(layer_ids=[1]))
    with pytest.raises(InputError, match="other settings"):
        begin(folder, record())


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "3", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "stage": "x", "config": {}, "q": 1}'],
)
def test_a_manifest_of_another_schema_is_refused_by_name(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    for attempt in (lambda: manifest.read(folder, SCRIPT), lambda: begin(folder, record())):
        with pytest.raises(InputError, match=r"manifest.json: expected a manifest of schema 1. .*--over"):
            attempt()


def test_a_manifest_that_is_absent_or_torn_is_bad_input(folder: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist. Run `03_capture_hidden.py` first"):
        manifest.read(folder, SCRIPT)
    folder.mkdir()
    (folder / "manifest.json").write_text('{"stage": ')
    with pytest.raises(InputError, match="not valid JSON"):
        manifest.read(folder, SCRIPT)
    with pytest.raises(InputError, match="not valid JSON"):
        begin(folder, record())
    assert begin(folder, record(), overwrite=True)


# ----------------------------------------------------------------------------------------------------------
# What it holds


def test_what_is_written_comes_back(folder: Path) -> None:
    made = Manifest("s", {"a": 1}, {"dataset": "ff"}, {"layer_ids": [2, 15, 27]}, {"rows": 3})
    made.write(folder)
    found = manifest.read(folder, "s.py")
    assert (found.stage, found.config, found.inputs) == ("s", {"a": 1}, {"dataset": "ff"})
    assert (found.facts, found.counts) == ({"layer_ids": [2, 15, 27]}, {"rows": 3})
    raw = json.loads((folder / "manifest.json").read_text())
    assert raw["schema"] == 1
    assert raw["created"].endswith("+00:00")
    assert raw["versions"]["speculators"] == "0.9.0"
    assert raw["argv"]


@pytest.mark.parametrize(
    "counts",
    [
        {"read": 10, "written": 10},
        {"read": 10, "written": 5, "dropped": {"empty": 2, "role": 1}, "failed": 2},
        {"read": 2, "failed": 2},
        {"distinct_tokens": 7},
    ],
)
def test_counts_that_add_up_are_written(folder: Path, counts: dict) -> None:
    Manifest("s", {}, counts=counts).write(folder)
    assert manifest.read(folder, "s.py").counts == counts


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"read": 10, "written": 9}, "10 rows were read but 9 are accounted for"),
        ({"read": 10, "written": 9, "dropped": {"empty": 2}}, "10 rows were read but 11 are accounted for"),
        ({"read": 10}, "10 rows were read but 0 are accounted for"),
    ],
)
def test_counts_that_do_not_add_up_fail_the_stage_and_write_nothing(folder, counts, message: str) -> None:
    begin(folder, record())
    with pytest.raises(StageError, match=message) as failed:
        Manifest("s", {}, counts=counts).write(folder)
    assert failed.value.exit_code == 1
    assert [p.name for p in folder.iterdir()] == [".started.json"]


# ----------------------------------------------------------------------------------------------------------
# Fingerprints and the staleness check


def test_a_file_s_fingerprint_is_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert manifest.fingerprint(path) == "ba7816bf8f01cfea"  # SHA-256 of "abc"
    with pytest.raises(InputError, match="absent: no such file or folder"):
        manifest.fingerprint(tmp_path / "absent")


def test_a_finished_folder_s_fingerprint_is_its_manifest_s(folder: Path) -> None:
    record().write(folder)
    before = manifest.fingerprint(folder)
    assert before == manifest.fingerprint(folder / "manifest.json")
    (folder / "more").write_text("x")
    assert manifest.fingerprint(folder) == before
    Manifest("s", {}).write(folder)
    assert manifest.fingerprint(folder) != before


def test_a_foreign_folder_s_fingerprint_is_of_names_and_sizes_without_locks(folder: Path) -> None:
    folder.mkdir()
    (folder / "data.arrow").write_bytes(b"12345")
    before = manifest.fingerprint(folder)
    with atomic_io.locked(folder):
        assert manifest.fingerprint(folder) == before
    (folder / "data.arrow").write_bytes(b"123456")
    assert manifest.fingerprint(folder) != before


def test_a_consumer_made_from_another_data_set_is_refused(tmp_path: Path) -> None:
    dataset, states = tmp_path / "dataset", tmp_path / "hidden_states"
    Manifest("01b", {"n": 1}).write(dataset)
    Manifest("03", {}, {"dataset": manifest.fingerprint(dataset)}).write(states)

    def check(accept_stale: bool):
        return manifest.require_made_from(
            states, {"dataset": dataset}, made_by=SCRIPT, accept_stale=accept_stale
        )

    assert check(False)[1] == []
    Manifest("01b", {"n": 2}).write(dataset)
    with pytest.raises(InputError) as refused:
        check(False)
    assert "was not made from the present dataset/" in str(refused.value)
    assert "Run `03_capture_hidden.py --overwrite`, or pass --accept-stale" in str(refused.value)
    found, stale = check(True)
    assert (found.stage, stale) == ("03", ["dataset"])


# ----------------------------------------------------------------------------------------------------------
# Settled settings


@pytest.mark.parametrize(
    ("flag", "inherited", "value", "said"),
    [
        (None, None, 3, "k: 3 (default)"),
        (None, 5, 5, "k: 5 (inherited)"),
        (7, None, 7, "k: 7 (by flag or config file)"),
        (7, 7, 7, "k: 7 (by flag or config file)"),
        (7, 5, 7, "k: 7 (overridden by flag or config file (the stage before has 5))"),
        (0, 5, 0, "k: 0 (overridden by flag or config file (the stage before has 5))"),
    ],
)
def test_a_setting_says_where_it_comes_from(caplog, flag, inherited, value: int, said: str) -> None:
    with caplog.at_level(logging.INFO, logger="stage.manifest"):
        assert manifest.settle("k", flag=flag, inherited=inherited, default=3) == value
    assert caplog.messages == [said]
