"""Command line of a stage: flag > YAML section > default, and argparse alone checks all three."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common import log
from common.errors import InputError, StageError

_INTERRUPTED = 130


def stage_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that every stage has.

    Args:
        doc: the script's docstring; it is shown as it is.

    Returns:
        A parser without abbreviations, so that a misspelt flag is refused instead of guessed.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    run = parser.add_argument_group("Run")
    run.add_argument("--config", type=Path, help="YAML file; its section named after the script sets flags")
    run.add_argument(
        "--print-config", action="store_true", help="show each resolved value, its source, and stop"
    )
    run.add_argument(
        "--run-dir", type=Path, default=Path("runs/default"), help="folder that all stages share"
    )
    run.add_argument(
        "--overwrite",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="discard this stage's old output",
    )
    run.add_argument(
        "--accept-stale",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="go on although an input changed after it was used; recorded in the manifest",
    )
    run.add_argument(
        "--debug", action=argparse.BooleanOptionalAction, default=False, help="tracebacks, debug log"
    )
    return parser


def stage(build_parser: Callable[[], argparse.ArgumentParser]) -> Callable[..., Callable[..., int]]:
    """Decorator: `main(args) -> int | None` becomes `main(argv=None) -> int` with our exit codes.

    0 done, 1 failed, 2 usage or bad input, 130 interrupted and resumable.
    """

    def decorate(body: Callable[[argparse.Namespace], int | None]) -> Callable[..., int]:
        @functools.wraps(body)
        def main(argv: list[str] | None = None) -> int:
            argv = sys.argv[1:] if argv is None else argv
            debug = "--debug" in argv
            section = Path(sys.modules[body.__module__].__file__ or "").stem
            try:
                args = parse(build_parser(), section, argv)
                debug = args.debug
                log.setup(logging.DEBUG if debug else logging.INFO)
                return body(args) or 0
            except KeyboardInterrupt:
                print("interrupted: run the same command again to resume", file=sys.stderr)
                return _INTERRUPTED
            except (StageError, OSError) as error:
                if debug:
                    raise
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code if isinstance(error, StageError) else StageError.exit_code

        return main

    return decorate


def parse(parser: argparse.ArgumentParser, section: str, argv: list[str]) -> argparse.Namespace:
    """Parse `argv` over the tokens of the YAML section.

    Args:
        parser: from `stage_parser`, with the stage's own flags added.
        section: the YAML file's top-level key for this stage, e.g. `04_train`.
        argv: the real command line, without the program's name.

    Raises:
        InputError: the file is missing, is no YAML mapping, or has a section that no script has.
        SystemExit: argparse's own checks (code 2), `--help` and `--print-config` (code 0).
    """
    flags = {token.split("=", 1)[0] for token in argv if token.startswith("--")}
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    config = early.parse_known_args(argv)[0].config
    values = _read_section(config, section) if config else {}
    tokens: list[str] = []
    for key, value in values.items():
        # A list flag would otherwise collect the file's values and the command line's.
        if not {f"--{key}", f"--no-{key}"} & flags:
            tokens += _tokens(parser, key, value)
    args = parser.parse_args(tokens + argv)
    if args.print_config:
        print(_describe(parser, args, section, {_flag(t) for t in tokens}, flags))
        parser.exit(0)
    return args


def _read_section(path: Path, section: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except yaml.YAMLError as error:
        raise InputError(f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"--config {path}: expected one section a script, found {type(document).__name__}")
    scripts = {script.stem for script in Path(__file__).parent.parent.glob("0*.py")}
    unknown = [key for key in document if key not in scripts and not str(key).startswith("x-")]
    if unknown:
        raise InputError(
            f"--config {path}: unknown section {unknown[0]!r}; sections are named after the scripts "
            f"({', '.join(sorted(scripts))}), and x-... may hold YAML anchors"
        )
    values = document.get(section) or {}
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: section {section!r} must map flags to values")
    return {str(key).replace("_", "-"): value for key, value in values.items()}


def _tokens(parser: argparse.ArgumentParser, key: str, value: Any) -> list[str]:
    flag = f"--{key}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{key}"]
    if isinstance(value, list):
        actions = {option: action for action in parser._actions for option in action.option_strings}
        repeated = flag in actions and actions[flag].nargs is None
        return [f"{flag}={item}" for item in value] if repeated else [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _flag(token: str) -> str:
    return token.split("=", 1)[0].replace("--no-", "--")


def _describe(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    section: str,
    from_file: set[str],
    flags: set[str],
) -> str:
    lines = [f"{section}:"]
    given = {_flag(flag) for flag in flags}
    for action in parser._actions:
        if action.dest in ("help", "print_config", "config") or not action.option_strings:
            continue
        name = action.option_strings[0]
        source = "flag" if name in given else "file" if name in from_file else "default"
        value = getattr(args, action.dest)
        value = os.fspath(value) if isinstance(value, Path) else value
        value = (
            [os.fspath(item) if isinstance(item, Path) else item for item in value]
            if isinstance(value, list)
            else value
        )
        lines.append(f"  {yaml.safe_dump({name[2:]: value}, default_flow_style=None).strip()}  # {source}")
    return "\n".join(lines)
