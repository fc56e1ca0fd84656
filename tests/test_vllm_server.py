"""Command lines of the server, and how it starts, dies and stops."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from common import vllm_server
from common.errors import InputError
from common.verifier import Verifier


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    vllm_server.add_arguments(parser)
    return parser.parse_args(argv)


def test_neither_a_server_nor_an_endpoint_is_refused() -> None:
    with pytest.raises(InputError, match="pass --serve to start vLLM here, or --endpoint URL"):
        vllm_server.check(parse())


def test_a_server_and_an_endpoint_together_are_refused() -> None:
    with pytest.raises(InputError, match="pass one of them"):
        vllm_server.check(parse("--serve", "--endpoint", "http://127.0.0.1:8000/v1"))


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(InputError, match="expected http://HOST:PORT/v1"):
        vllm_server.check(parse("--endpoint", "localhost:8000"))


def test_server_flags_with_an_open_quote_are_refused() -> None:
    with pytest.raises(InputError, match=r"--server-args .*No closing quotation"):
        vllm_server.check(parse("--serve", "--server-args", "'oops"))


def test_an_endpoint_where_nothing_listens_is_refused(tmp_path: Path) -> None:
    arguments = parse("--endpoint", "http://127.0.0.1:9/v1")
    with pytest.raises(InputError, match="does not answer"):
        vllm_server.serving(arguments, Verifier("m"), [], tmp_path / "log").__enter__()


def test_urls_are_known_with_and_without_their_version() -> None:
    assert vllm_server.base_url("http://h:1/") == "http://h:1/v1"
    assert vllm_server.base_url("http://h:1/v1") == "http://h:1/v1"
    assert vllm_server.root_url("http://h:1/v1/") == "http://h:1"
    assert vllm_server.root_url("http://h:1") == "http://h:1"


def test_capture_asks_for_the_last_layer_beside_the_three(tmp_path: Path) -> None:
    flags = vllm_server.capture_args([2, 30, 58], 61, tmp_path)
    speculative = json.loads(flags[flags.index("--speculative-config") + 1])
    transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [2, 30, 58, 61]
    assert speculative["method"] == "extract_hidden_states"
    assert transfer["kv_connector_module_path"] == "common.vllm_connector"
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    assert "--no-enable-prefix-caching" in flags


def test_a_drafter_is_served_without_prefix_caching(tmp_path: Path) -> None:
    flags = vllm_server.speculative_args(tmp_path, 3)
    assert json.loads(flags[1]) == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert "--no-enable-prefix-caching" in flags


def test_revision_and_remote_code_reach_the_server_and_later_flags_come_last() -> None:
    verifier = Verifier("org/model", revision="abc", trust_remote_code=True)
    line = vllm_server.command(verifier, ["--max-model-len", "7"], 8000)
    assert line[line.index("--revision") + 1] == "abc"
    assert "--trust-remote-code" in line
    assert line[-2:] == ["--max-model-len", "7"]


def test_the_server_finds_the_connector_and_sends_no_statistics() -> None:
    environment = vllm_server.environment()
    root = environment["PYTHONPATH"].split(os.pathsep)[0]
    assert (Path(root) / "common" / "vllm_connector.py").exists()
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.vllm
def test_a_server_that_cannot_start_is_reported_with_its_own_words(
    verifier_dir: Path, tmp_path: Path
) -> None:
    arguments = parse("--serve", "--server-args", "--no-such-flag 3")
    with pytest.raises(vllm_server.ServerDied, match="unrecognized arguments: --no-such-flag"):
        vllm_server.serving(arguments, Verifier(str(verifier_dir)), [], tmp_path / "log").__enter__()
    assert "--no-such-flag" in (tmp_path / "log").read_text()
