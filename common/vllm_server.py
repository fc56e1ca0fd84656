"""A vLLM server for one stage: started and stopped by it (`--serve`) or running already (`--endpoint`)."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from common import log
from common.errors import InputError, StageError
from common.verifier import Verifier

_LOG = log.get("vllm_server")
_ROOT = Path(__file__).resolve().parent.parent
_CPU_KV_CACHE_GIB = "2"
_PROBE_TIMEOUT_S = 10
_STOP_TIMEOUT_S = 30
_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 12
# An exception's last line, behind vLLM's `(EngineCore pid=1) ERROR 11-30 14:15:32 [core.py:402] ` or not.
_ERROR_LINE = re.compile(r"(?:^|\] |\) )(?:[\w.]+(?:Error|Exception): |[\w.]+: error: )")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which server answers."""
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--serve",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="start vLLM for this stage and stop it at the end",
    )
    group.add_argument(
        "--endpoint",
        action="append",
        metavar="URL",
        help="base URL of a running server, e.g. http://127.0.0.1:8000/v1; repeatable",
    )
    group.add_argument(
        "--server-args",
        default="",
        metavar="STRING",
        help="more vLLM flags for --serve, as one string: '--tensor-parallel-size 8'; they win over ours",
    )
    group.add_argument(
        "--server-timeout",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="longest wait for --serve's start",
    )
    group.add_argument("--port", type=int, help="TCP port for --serve; default: a free one")


def check(args: argparse.Namespace) -> None:
    """Refuse both or neither of --serve and --endpoint, before anything is read or written.

    Raises:
        InputError: both or neither is given, a URL is no http(s) URL, or --server-args has an open quote.
    """
    if args.serve and args.endpoint:
        raise InputError(
            "--serve starts a server and --endpoint names a running one: pass one of them "
            "(--no-serve takes back a `serve: true` of the --config file)"
        )
    if not args.serve and not args.endpoint:
        raise InputError("no server: pass --serve to start vLLM here, or --endpoint URL of one that runs")
    for url in args.endpoint or []:
        if not re.match(r"https?://[^/]+", url):
            raise InputError(f"--endpoint {url}: expected http://HOST:PORT/v1")
    split_args(args)


def split_args(args: argparse.Namespace) -> list[str]:
    """--server-args as a shell would split them.

    Raises:
        InputError: a quote is open.
    """
    try:
        return shlex.split(args.server_args)
    except ValueError as error:
        raise InputError(f"--server-args {args.server_args!r} cannot be split: {error}") from None


@contextmanager
def serving(
    args: argparse.Namespace, verifier: Verifier, extra_args: Sequence[str], log_file: Path
) -> Iterator[list[str]]:
    """Base URLs (ending in /v1) of servers that answer, for the time of a `with` block.

    Args:
        args: with the flags of `add_arguments`.
        verifier: what --serve loads; it is served under `verifier.name`.
        extra_args: vLLM flags that the stage needs (`capture_args`, `speculative_args`, ...).
        log_file: where a managed server's output goes.

    Raises:
        InputError: `check` fails, or a given endpoint does not answer.
        StageError: a managed server dies or is not up in --server-timeout; the message has its last lines.
    """
    check(args)
    if args.endpoint:
        urls = [base_url(url) for url in args.endpoint]
        for url in urls:
            require_answer(url)
        yield urls
        return
    port = args.port or _free_port()
    arguments = command(verifier, [*extra_args, *split_args(args)], port)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        _LOG.info("vLLM: starting on port %d, log in %s", port, log_file)
        _LOG.debug("vLLM: %s", shlex.join(arguments))
        start = output.tell()
        process = subprocess.Popen(
            arguments,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
            preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
        )
        try:
            url = f"http://127.0.0.1:{port}/v1"
            seconds = _wait_until_healthy(url, process, args.server_timeout, log_file, start)
            _LOG.info("vLLM: ready after %.0f s", seconds)
            yield [url]
        except StageError as error:
            if process.poll() is None or isinstance(error, ServerDied):
                raise
            raise _died(process, log_file, start) from error
        finally:
            _stop(process)


class ServerDied(StageError):
    """The managed server ended by itself."""


def command(verifier: Verifier, extra_args: Sequence[str], port: int) -> list[str]:
    """The full command line of a server for `verifier`.

    The module is started, not the `vllm` console script: that one fails in the CPU build, which has no
    distribution named vllm. Later flags win, so `extra_args` may override anything here.
    """
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", verifier.name, "--served-model-name", verifier.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(("--revision", verifier.revision) if verifier.revision else ()),
        *(("--trust-remote-code",) if verifier.trust_remote_code else ()),
        *(("--enforce-eager",) if _is_cpu_build() else ()),
        *extra_args,
    ]


def environment() -> dict[str, str]:
    """The server's environment: ours, with this repository importable for `common.vllm_connector`."""
    inherited = os.environ.get("PYTHONPATH")
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *([inherited] if inherited else [])]),
    }
    if _is_cpu_build():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)
    return env


def capture_args(layer_ids: Sequence[int], num_layers: int, shared_folder: Path) -> list[str]:
    """vLLM's flags for handing out hidden states.

    Args:
        layer_ids: the three aux ids, vLLM convention (id L = output after L layers).
        num_layers: N; the last layer's output before the final norm is added under this id.
        shared_folder: where the server writes one file a request.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layer_ids, num_layers]},
        },
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "common.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(shared_folder.resolve())},
    }
    return [
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer)),
        # A cached prefix is not computed again, so its states would be missing.
        "--no-enable-prefix-caching",
    ]


def speculative_args(drafter_dir: Path, k: int) -> list[str]:
    """vLLM's flags for serving with an EAGLE-3 drafter that proposes k tokens a step, prefix caching off."""
    speculative = {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": k}
    return ["--speculative-config", json.dumps(speculative), "--no-enable-prefix-caching"]


def base_url(url: str) -> str:
    """`http://host:8000/` -> `http://host:8000/v1`; a URL that ends in /v1 stays."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"


def root_url(url: str) -> str:
    """`http://host:8000/v1` -> `http://host:8000`, where /health and /metrics are."""
    return base_url(url).removesuffix("/v1")


def require_answer(url: str) -> None:
    """Refuse a running server's URL behind which nothing answers.

    Raises:
        InputError: names the URL and what came of it.
    """
    import httpx

    try:
        status = httpx.get(f"{root_url(url)}/health", timeout=_PROBE_TIMEOUT_S).status_code
    except httpx.HTTPError as error:
        raise InputError(
            f"--endpoint {url} does not answer: {error}. Start the server, correct the URL, or pass --serve."
        ) from None
    if status >= 500:
        raise InputError(f"--endpoint {url}: /health answers {status}; look into the server's log")


def _wait_until_healthy(
    url: str, process: subprocess.Popen[bytes], timeout_s: float, log_file: Path, start: int
) -> float:
    import httpx

    begun = time.monotonic()
    with httpx.Client(timeout=_PROBE_TIMEOUT_S) as client:
        while time.monotonic() - begun < timeout_s:
            if process.poll() is not None:
                raise _died(process, log_file, start)
            with suppress(httpx.HTTPError):
                if client.get(f"{root_url(url)}/health").status_code == 200:
                    return time.monotonic() - begun
            time.sleep(0.25)
    raise StageError(
        f"vLLM was not ready after {timeout_s:.0f} s. Raise --server-timeout if it is still loading weights. "
        f"{_last_words(log_file, start)}"
    )


def _died(process: subprocess.Popen[bytes], log_file: Path, start: int) -> ServerDied:
    return ServerDied(f"vLLM ended with code {process.returncode}. {_last_words(log_file, start)}")


def _last_words(log_file: Path, start: int) -> str:
    """The first error in this server's part of the log, which is the cause, and the last lines."""
    with log_file.open("rb") as file:
        file.seek(start)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    cause = next((line for line in lines if _ERROR_LINE.search(line)), None)
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"{f'First error: {cause.strip()}. ' if cause else ''}The end of {log_file}:\n{tail}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and all its workers: politely, then by force."""
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _LOG.warning("vLLM did not stop in %d s and is killed", _STOP_TIMEOUT_S)
    finally:
        # Workers that outlive the front end would keep its memory.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _die_with_parent():  # type: ignore[no-untyped-def]
    """A hook for the child: when this process is killed with -9, the server gets SIGTERM.

    Without it the server would hold the GPUs and the next run could not start.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_cpu_build() -> bool:
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
