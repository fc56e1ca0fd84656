"""Command line of a stage: flag > YAML section > default, and argparse alone checks all three."""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import json
import logging
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml

from common import log
from common.errors import InputError, StageError

_INTERRUPTED = 130
_YES_NO = yaml.SafeLoader.bool_values  # yes, no, true, false, on, off


class _AsWritten(yaml.SafeLoader):
    """YAML whose scalars stay text: argparse gives them their types, as on the command line.

    Plain YAML 1.1 reads `thinking: on` as True, `3:00:00` as 10800 and `1e-4` as text; `null` and `<<` stay.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, match) for tag, match in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value.replace("_", "-") for key, _ in node.value if isinstance(key.value, str)]
        twice = next((key for key in keys if key != "<<" and keys.count(key) > 1), None)
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice!r} is there twice; only the last would count", node.start_mark
            )
        return super().construct_mapping(node, deep)


def seconds(text: str) -> float:
    """An argparse type: `3h`, `90m`, `45s`, `1.5d` or plain seconds, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 3h, 90m, 45s or plain seconds")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, found {value}")
    return value


def json_value(text: str) -> Any:
    """argparse type: JSON; argparse itself would call it an `invalid loads value`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


# What stands for a value where a flag names nothing better; argparse would repeat the flag in capitals.
_KINDS: dict[Any, str] = {
    int: "N",
    positive: "N",
    float: "X",
    share: "SHARE",
    seconds: "TIME",
    Path: "PATH",
    None: "NAME",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds what the help of a flag leaves out: its default, that it is required, the kind of its value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        said, default = action.help or "", action.default
        if action.required:
            return f"{said}; required"
        nothing = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if nothing or re.search(r"\bdefault\b", said):
            return said
        if default is True:
            shown = action.option_strings[0]
        else:
            values = default if isinstance(default, list) else [default]
            shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{said}; default: {shown.replace('%', '%%')}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _KINDS.get(action.type, "VALUE")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE:
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of forty flags would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (python {self.prog} --help lists the flags)\n")


def stage_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that every stage has.

    Args:
        doc: the script's docstring; it is shown as it is.

    Returns:
        A parser without abbreviations, so that a misspelt flag is refused instead of guessed.
    """
    parser = _Parser(
        usage="python %(prog)s [flags]", description=doc, formatter_class=_Help, allow_abbrev=False
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
                reach_loopback_directly()
                with _sigterm_as_interrupt():
                    return body(args) or 0
            except KeyboardInterrupt:
                again = " without --overwrite" if "--overwrite" in argv else ""
                print(f"interrupted: run the same command again{again} to resume", file=sys.stderr)
                return _INTERRUPTED
            except Exception as error:
                if debug:
                    raise
                print(f"error: {_paragraph(error)}", file=sys.stderr)
                return error.exit_code if isinstance(error, StageError) else StageError.exit_code

        return main

    return decorate


def _paragraph(error: Exception) -> str:
    """What the user reads of an error."""
    # Whoever raises it has imported it; --help does not wait for it.
    safetensors: Any = sys.modules.get("safetensors")
    of_tensors = safetensors is not None and isinstance(error, safetensors.SafetensorError)
    full = of_tensors and re.search(r"os error (28|122)\b", str(error))
    if full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        name = getattr(error, "filename", None) or "a file"
        return (
            f"{name} could not be written: the disk is full or its quota used up. Free some space, or put "
            "--run-dir on a larger file system; the same command then resumes."
        )
    if of_tensors:
        return f"a tensor file is damaged or could not be written: {error} (--debug shows which)"
    if isinstance(error, StageError | OSError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())} (a defect; --debug shows where)"


def reach_loopback_directly() -> None:
    """A proxy of the environment does not know servers on this machine; all HTTP clients read no_proxy."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*listed.split(","), "localhost", "127.0.0.1", "::1"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, hosts))


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (schedulers, spot machines) end the stage as Ctrl-C does, through every `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # default_int_handler itself, not SIGINT: a shell's background job has SIGINT ignored.
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def parse(parser: argparse.ArgumentParser, section: str, argv: list[str]) -> argparse.Namespace:
    """Parse `argv` over the tokens of the YAML section.

    Args:
        parser: from `stage_parser`, with the stage's own flags added.
        section: the YAML file's top-level key for this stage, e.g. `04_train`.
        argv: the real command line, without the program's name.

    Raises:
        InputError: the file is missing, is no YAML mapping, or has a section or a key that no script has.
        SystemExit: argparse's own checks (code 2), `--help` and `--print-config` (code 0).
    """
    flags = {token.split("=", 1)[0] for token in argv if token.startswith("--")}
    early = _Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    config = early.parse_known_args(argv)[0].config
    tokens: list[str] = []
    for key, value in (_read_section(config, section, parser) if config else {}).items():
        # A list flag would otherwise collect the file's values and the command line's.
        if not {f"--{key}", f"--no-{key}"} & flags:
            tokens += _tokens(parser._option_string_actions[f"--{key}"], key, value, f"--config {config}")
    args = parser.parse_args(tokens + argv)
    if args.print_config:
        print(_describe(parser, args, section, {_flag(t) for t in tokens}, flags))
        parser.exit(0)
    return args


def _read_section(path: Path, section: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _AsWritten)
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
    values = {str(key).replace("_", "-"): value for key, value in values.items()}
    flags = {option[2:] for option in parser._option_string_actions if option.startswith("--")}
    for key in values.keys() - (flags - {"config", "help", "print-config"}):
        near = difflib.get_close_matches(key, flags, n=1)
        raise InputError(
            f"--config {path}, section {section!r}: {section}.py has no flag --{key}"
            + (f"; the nearest is --{near[0]}" if near else "; --help lists them")
        )
    return values


def _tokens(action: argparse.Action, key: str, value: Any, origin: str) -> list[str]:
    """One key of the file as it would be typed; null and an empty list are as if the key were absent."""
    flag = f"--{key}"
    if value is None or value == []:
        return []
    items = value if isinstance(value, list) else [value]
    nested = next((item for item in items if not isinstance(item, str)), None)
    if nested is not None:
        raise InputError(f"{origin}: {key} must be one value or a list of values, found {nested!r} in it")
    if isinstance(value, list):
        if action.nargs is not None:
            return [flag, *items]
        if not isinstance(action, argparse._AppendAction):
            raise InputError(f"{origin}: {key} takes one value, found a list of {len(items)}")
        return [f"{flag}={item}" for item in items]
    if isinstance(action, argparse.BooleanOptionalAction) and value.lower() in _YES_NO:
        return [flag if _YES_NO[value.lower()] else f"--no-{key}"]
    return [f"{flag}={value}"]


def _flag(token: str) -> str:
    name = token.split("=", 1)[0]
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


def _describe(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    section: str,
    from_file: set[str],
    flags: set[str],
) -> str:
    """The resolved values as a section that --config reads back."""
    lines = [f"{section}:"]
    given = {_flag(flag) for flag in flags}
    for action in parser._actions:
        if action.dest in ("help", "print_config", "config") or not action.option_strings:
            continue
        name = action.option_strings[0]
        source = "flag" if name in given else "file" if name in from_file else "default"
        value = _plain(getattr(args, action.dest))
        # Lists stay on the key's line; a mapping of scalars alone would be put in braces by the same style.
        style = None if isinstance(value, list) else False
        shown = yaml.safe_dump(
            {name[2:]: value}, default_flow_style=style, width=float("inf"), allow_unicode=True
        )
        lines.append(f"  {shown.strip()}  # {source}")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """A parsed value in YAML's types; what a flag reads as JSON is shown as JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return value if value is None or isinstance(value, bool | int | float) else str(value)
