"""The command line of a stage: flag > YAML > default, one parser for all three, four exit codes."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml
from safetensors import SafetensorError

from common import cli
from common.errors import InputError, StageError
from common.inference_pool import InferencePool
from tests.faulty_server import FaultyServer

# One that exists, since sections are named after the scripts that are there.
SECTION = "02_build_vocab_map"


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser("A stage for these tests.")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--thinking", choices=("on", "off", "default"), default="default")
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--drop-empty", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--endpoint", action="append")
    parser.add_argument("--layer-ids", type=int, nargs=3)
    parser.add_argument("--force-token", nargs="+", action="extend", default=[])
    parser.add_argument("--max-time", default="")
    parser.add_argument("--extra-body", type=cli.json_value)
    return parser


@pytest.fixture
def parse(tmp_path: Path):
    """Parse a YAML text for the section (or a whole document) and a command line."""

    def parse(section: str = "", argv: str = "", document: str | None = None) -> argparse.Namespace:
        path = tmp_path / "stage.yaml"
        lines = "".join(f"  {line}\n" for line in section.splitlines())
        path.write_text(f"{SECTION}:\n{lines}" if document is None else document)
        return cli.parse(build_parser(), SECTION, ["--config", str(path), *argv.split()])

    return parse


# ----------------------------------------------------------------------------------------------------------
# Which value wins


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h", 10800), ("90m", 5400), ("45s", 45), ("1.5d", 129600), ("20", 20)]
)
def test_times_are_read_in_seconds(text: str, seconds: float) -> None:
    assert cli.seconds(text) == seconds


def test_a_flag_beats_the_file_and_the_file_beats_the_default(parse) -> None:
    assert parse("").lr == 1e-3
    assert parse("lr: 0.5").lr == 0.5
    assert parse("lr: 0.5", "--lr 0.25").lr == 0.25
    assert parse("lr: 0.5", "--lr=0.25").lr == 0.25


def test_list_flags_of_the_command_line_replace_the_file_s(parse) -> None:
    text = "endpoint: [http://a/v1, http://b/v1]\nforce-token: [x, y]\nlayer-ids: [2, 15, 27]"
    assert parse(text).endpoint == ["http://a/v1", "http://b/v1"]
    assert parse(text).force_token == ["x", "y"]
    assert parse(text).layer_ids == [2, 15, 27]
    args = parse(text, "--endpoint http://c/v1 --force-token z --layer-ids 1 2 3")
    assert (args.endpoint, args.force_token, args.layer_ids) == (["http://c/v1"], ["z"], [1, 2, 3])


def test_a_single_value_stands_for_a_list_of_one(parse) -> None:
    args = parse("endpoint: http://a/v1\nforce-token: <think>")
    assert (args.endpoint, args.force_token) == (["http://a/v1"], ["<think>"])


def test_booleans_of_the_file_switch_on_and_off_and_the_flag_takes_them_back(parse) -> None:
    assert parse("serve: true").serve is True
    assert parse("drop_empty: false").drop_empty is False
    assert parse("serve: true", "--no-serve").serve is False
    assert parse("drop-empty: no", "--drop-empty").drop_empty is True
    assert parse("serve: on").serve is True


def test_words_that_yaml_takes_for_booleans_or_numbers_arrive_as_written(parse) -> None:
    args = parse("thinking: on\nmax-time: 3:00:00\nlr: 1e-4")
    assert (args.thinking, args.max_time, args.lr) == ("on", "3:00:00", 1e-4)
    assert parse("thinking: off").thinking == "off"
    assert parse("force-token: [010, 1_000, 2024-01-31]").force_token == ["010", "1_000", "2024-01-31"]


def test_null_and_an_empty_list_leave_the_default(parse) -> None:
    args = parse("lr: null\nendpoint: ~\nforce-token: []\nlayer-ids:")
    assert (args.lr, args.endpoint, args.force_token, args.layer_ids) == (1e-3, None, [], None)


def test_underscores_in_keys_mean_dashes(parse) -> None:
    assert parse("force_token: [a]").force_token == ["a"]


def test_values_that_look_like_flags_stay_values(parse) -> None:
    assert parse("max-time: --not-a-flag 3").max_time == "--not-a-flag 3"


def test_anchors_and_merges_share_keys_between_sections(parse) -> None:
    document = f"x-server: &server\n  serve: true\n  lr: 0.5\n{SECTION}:\n  <<: *server\n  lr: 0.25\n"
    args = parse(document=document)
    assert (args.serve, args.lr) == (True, 0.25)


def test_other_stages_sections_are_left_alone(parse) -> None:
    assert parse(document="01_prepare_data:\n  anything: 1\n").lr == 1e-3


def test_a_misspelt_flag_is_refused_and_not_guessed(parse, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("", "--layer 1 2 3")
    assert stopped.value.code == 2
    assert "--layer" in capsys.readouterr().err


def test_a_wrong_command_line_is_one_line_without_the_usage(parse, capsys) -> None:
    with pytest.raises(SystemExit):
        parse("", "--lr fast")
    prog = build_parser().prog
    said = f"error: argument --lr: invalid float value: 'fast' (python {prog} --help lists the flags)"
    assert capsys.readouterr().err == f"{said}\n"


def test_what_is_no_json_is_said_to_be_none(parse, capsys) -> None:
    with pytest.raises(SystemExit):
        parse("", "--extra-body {top_k}")
    assert "argument --extra-body: '{top_k}' is not JSON: Expecting property" in capsys.readouterr().err


def test_help_adds_defaults_and_kinds_of_values_where_a_flag_leaves_them_out(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parser = cli.stage_parser("A stage.")
    parser.add_argument("--lr", type=float, default=1e-4, help="rate")
    parser.add_argument("--ids", type=int, nargs="+", default=[2, 15], help="layers")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="keep")
    parser.add_argument("--port", type=int, help="a port; default: a free one")
    parser.add_argument("--data", type=Path, required=True, help="rows")
    said = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert "--lr X rate; default: 0.0001" in said
    assert "--ids N ... layers; default: 2 15" in said
    assert "--keep, --no-keep keep; default: --keep" in said
    assert "--port N a port; default: a free one" in said
    assert "--data PATH rows; required" in said
    assert "--run-dir PATH folder that all stages share; default: runs/default" in said
    assert not any("overwrite" in line and "default" in line for line in said)


# ----------------------------------------------------------------------------------------------------------
# What is refused, by name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("layer-idz: [1, 2, 3]", "no flag --layer-idz; the nearest is --layer-ids"),
        ("qqqq: 1", "no flag --qqqq"),
        ("help: true", "no flag --help"),
        ("config: other.yaml", "no flag --config"),
        ("lr: [0.1, 0.2]", "lr takes one value, found a list of 2"),
        ("extra-body: {top_k: 20}", "extra-body must be one value or a list of values"),
        ("endpoint: [[a]]", "endpoint must be one value or a list of values"),
        ("lr: 1\nlr: 2", "'lr' is there twice"),
        ("force-token: [a]\nforce_token: [b]", "'force-token' is there twice"),
    ],
)
def test_a_wrong_key_or_value_of_the_file_is_named(parse, section: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(section)
    assert message in str(refused.value)
    assert "stage.yaml" in str(refused.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("02_build_vocab_mop:\n  lr: 1\n", "unknown section '02_build_vocab_mop'"),
        ("- a\n- b\n", "expected one section a script, found list"),
        ("", "expected one section a script, found NoneType"),
        (f"{SECTION}: 3\n", "must map flags to values"),
        (f"{SECTION}: [lr\n", "is not valid YAML"),
        (f"{SECTION}: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_a_document_of_another_shape_is_refused(parse, document: str, message: str) -> None:
    with pytest.raises(InputError, match=r"--config .*stage.yaml") as refused:
        parse(document=document)
    assert message in str(refused.value)


@pytest.mark.parametrize("section", ["lr: fast", "serve: perhaps", "layer-ids: [1, 2]", "thinking: maybe"])
def test_types_choices_and_numbers_of_the_file_are_checked_by_argparse(parse, section: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(section)
    assert stopped.value.code == 2
    assert f"--{section.split(':')[0]}" in capsys.readouterr().err


def test_a_config_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"x-a: \xff\n")
    for path, message in (
        (tmp_path / "absent.yaml", "no such file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "latin.yaml", "is not valid YAML"),
    ):
        with pytest.raises(InputError, match=message):
            cli.parse(build_parser(), SECTION, ["--config", str(path)])


# ----------------------------------------------------------------------------------------------------------
# --print-config


def print_config(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.parse(build_parser(), SECTION, [*argv, "--print-config"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_print_config_names_the_source_of_each_value(tmp_path: Path, capsys) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(f"{SECTION}:\n  thinking: on\n  drop-empty: false\n  force-token: [a]\n  lr: 0.5\n")
    argv = ["--config", str(path), "--lr", "0.25", "--no-serve", "--extra-body", '{"top_k": 20}']
    assert print_config(argv, capsys).splitlines() == [
        f"{SECTION}:",
        "  run-dir: runs/default  # default",
        "  overwrite: false  # default",
        "  accept-stale: false  # default",
        "  debug: false  # default",
        "  lr: 0.25  # flag",
        "  thinking: 'on'  # file",
        "  serve: false  # flag",
        "  drop-empty: false  # file",
        "  endpoint: null  # default",
        "  layer-ids: null  # default",
        "  force-token: [a]  # file",
        "  max-time: ''  # default",
        "  extra-body: '{\"top_k\": 20}'  # flag",
    ]


def test_what_print_config_shows_is_a_config_with_the_same_values(tmp_path: Path, capsys) -> None:
    long = "word " * 60 + "# no comment, 'quotes' and Grüße"
    argv = ["--endpoint", "http://a/v1", "--force-token", *[f"<|token_{i}|>" for i in range(40)]]
    argv += ["--max-time", long, "--lr", "1e-05", "--thinking", "off", "--layer-ids", "2", "15", "27"]
    shown = print_config(argv, capsys)
    assert len(yaml.safe_load(shown)[SECTION]["force-token"]) == 40
    path = tmp_path / "again.yaml"
    path.write_text(shown)
    first = cli.parse(build_parser(), SECTION, argv)
    again = cli.parse(build_parser(), SECTION, ["--config", str(path)])
    assert vars(again) == vars(first) | {"config": path}
    assert again.max_time == long


# ----------------------------------------------------------------------------------------------------------
# Exit codes


def run(body, argv: list[str] | None = None) -> int:
    return cli.stage(build_parser)(body)(argv or [])


def fail_with(error: BaseException):
    def body(args: argparse.Namespace) -> int:
        raise error

    return body


def test_what_an_overwriting_run_has_begun_is_resumed_without_that_flag(capsys) -> None:
    assert run(fail_with(KeyboardInterrupt()), ["--run-dir", "r", "--overwrite"]) == 130
    assert "run the same command again without --overwrite to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StageError("the server died"), 1, "error: the server died"),
        (InputError("row 3 is torn"), 2, "error: row 3 is torn"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.bin"),
            1,
            "x.bin could not be written: the disk",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x.bin"), 1, "put --run-dir on a larger file system"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 1, "the same command then"),
        (SafetensorError("invalid header"), 1, "a tensor file is damaged or could not be written: invalid"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "Permission denied: 'x'"),
        (KeyboardInterrupt(), 130, "run the same command again to resume"),
    ],
)
def test_an_error_becomes_one_paragraph_and_its_code(error, code: int, message: str, capsys) -> None:
    assert run(fail_with(error)) == code
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_done_is_zero_whether_the_body_says_so_or_not() -> None:
    assert run(lambda args: None, []) == 0
    assert run(lambda args: 0, []) == 0
    assert run(lambda args: 1, []) == 1


def test_a_bad_config_is_code_two(tmp_path: Path, capsys) -> None:
    assert run(lambda args: 0, ["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(StageError, match="the server died"):
        run(fail_with(StageError("the server died")), ["--debug"])


def test_a_defect_is_one_line_that_says_so_and_debug_shows_where(capsys) -> None:
    defect = fail_with(RuntimeError("CUDA out of memory.\n  Tried to allocate 2 GiB"))
    assert run(defect) == 1
    said = "error: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB (a defect; --debug shows where)"
    assert capsys.readouterr().err == f"{said}\n"
    with pytest.raises(RuntimeError):
        run(defect, ["--debug"])


def test_a_proxy_of_the_environment_is_not_asked_for_servers_on_this_machine(monkeypatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")

    async def entries(url: str) -> list[dict]:
        async with InferencePool([url], concurrency=1) as pool:
            return await pool.models()

    with FaultyServer() as server:
        assert run(lambda args: 0 if asyncio.run(entries(server.url)) else 1) == 0
        assert run(lambda args: 0 if httpx.get(f"{server.url}/models").is_success else 1) == 0
    assert os.environ["no_proxy"] == "example.org,localhost,127.0.0.1,::1"


# ----------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize(
    ("kind", "good", "bad"), [(cli.positive, "1", ("0", "-1")), (cli.share, "1", ("1.01", "-0.1", "nan"))]
)
def test_numbers_out_of_range_are_refused(kind, good: str, bad: tuple[str, ...]) -> None:
    assert kind(good) == 1
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            kind(text)


def test_sigterm_ends_a_stage_as_ctrl_c_does(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    @cli.stage(lambda: cli.stage_parser("A stage."))
    def main(args: argparse.Namespace) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert main([]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
