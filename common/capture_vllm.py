"""Hidden states from a vLLM server that was started with `vllm_server.capture_args`."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InputError
from common.hidden_states import MOST_LOGITS, CaptureRow, Check, Damaged, HiddenStateStore, Outcome
from common.inference_pool import InferencePool

if TYPE_CHECKING:
    import torch
# A model's generation_config.json may bring penalties, by which greedy is not the most likely token any more.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class VllmBackend:
    """One completion of `max_tokens=1` a row; the server writes the file, and the store takes it over.

    Attributes:
        pool: entered already; its servers write into `shared_folder`.
        model: the name that they serve.
        store: where the states go.
        shared_folder: the only folder that a server may name a file in.
        layer_ids: the three aux ids and N.
        server_command: what starts a server for this, for error messages.
    """

    pool: InferencePool
    model: str
    store: HiddenStateStore
    shared_folder: Path
    layer_ids: Sequence[int]
    server_command: Sequence[str]

    async def capture(
        self, rows: Iterable[CaptureRow], check: Check | None, *, predict: bool = False
    ) -> AsyncIterator[tuple[CaptureRow, Outcome]]:
        """As `hidden_states.Backend`; reading, checking and writing run in threads."""

        async def work(row: CaptureRow) -> Outcome:
            prompts = [row.token_ids]
            if predict and len(row.token_ids) > MOST_LOGITS:
                prompts.insert(0, row.token_ids[:MOST_LOGITS])
            answers = [
                await self._ask(prompt, check is not None, predict and number == 0)
                for number, prompt in enumerate(prompts)
            ]
            try:
                await asyncio.to_thread(self._keep, row, answers, check)
            except Damaged as error:
                return error
            return None

        async for row, outcome in self.pool.run(rows, work):
            yield row, outcome

    async def _ask(self, prompt: torch.Tensor, words: bool, predict: bool) -> dict[str, Any]:
        answer = await self.pool.complete(
            model=self.model,
            prompt=prompt.tolist(),
            max_tokens=1,
            **_GREEDY,
            **({"return_token_ids": True} if words else {}),
            **({"prompt_logprobs": 1} if predict else {}),
        )
        return answer

    def _keep(self, row: CaptureRow, answers: list[dict[str, Any]], check: Check | None) -> None:
        *others, file = map(self._server_file, answers)
        for other in others:
            wait_until_written(other)
            other.unlink(missing_ok=True)
        wait_until_written(file)
        with self.store.adopting(row, file) as states:
            if check is not None:
                check(row.kept, states, _said(row, answers)[row.start :])

    def _server_file(self, answer: dict[str, Any]) -> Path:
        return server_file(answer, self.shared_folder, self.layer_ids, self.server_command)


@asynccontextmanager
async def connected(
    urls: list[str],
    model: str,
    store: HiddenStateStore,
    shared_folder: Path,
    layer_ids: Sequence[int],
    server_command: Sequence[str],
    *,
    longest: int,
    concurrency: int,
    outage_s: float,
) -> AsyncIterator[VllmBackend]:
    """A backend of running servers, for the time of the block.

    Args:
        urls: of the servers.
        model: the verifier; a server that has another name for it is asked under its own.
        store: where the states go.
        shared_folder: the only folder that a server may name a file in.
        layer_ids: the three aux ids and N.
        server_command: what starts a server for this, for error messages.
        longest: tokens of the longest row.
        concurrency: requests in flight for each endpoint.
        outage_s: seconds without an answer after which the servers are given up.

    Raises:
        InputError: the server takes fewer tokens than the longest row has.
    """
    async with InferencePool(urls, concurrency=concurrency, outage_s=outage_s) as pool:
        served = {entry["id"]: entry.get("max_model_len") for entry in await pool.models()}
        name = model if model in served else next(iter(served), model)
        if (limit := served.get(name)) is not None and limit <= longest:
            raise InputError(
                f"the server takes {limit} tokens (--max-model-len), the longest row has {longest} "
                f"and one more is generated. Start it with\n{shlex.join(server_command)}"
            )
        yield VllmBackend(pool, name, store, shared_folder, layer_ids, server_command)


def server_file(
    answer: dict[str, Any], shared_folder: Path, layer_ids: Sequence[int], server_command: Sequence[str]
) -> Path:
    """The file that a server names, if it may be touched.

    Args:
        answer: of a completion.
        shared_folder: the only folder that it may lie in.
        layer_ids: the three aux ids and N.
        server_command: what starts a server for this.

    Raises:
        InputError: the server does not capture, captures other layers, or names a path outside the
            shared folder.
    """
    named = answer.get("kv_transfer_params") or {}
    if "hidden_states_path" not in named:
        raise InputError(
            "the server hands out no hidden states: it was not started for that. Pass --serve, or "
            f"start it with\n{shlex.join(server_command)}"
        )
    ids = named.get("layer_ids")
    if ids is not None and list(ids) != list(layer_ids):
        raise InputError(
            f"the server captures the layers {ids}, this run wants {list(layer_ids)}. Pass "
            f"--layer-ids {' '.join(map(str, ids[:-1]))}, or restart it with\n"
            f"{shlex.join(server_command)}"
        )
    return _inside(Path(named["hidden_states_path"]), shared_folder)


def _inside(path: Path, shared_folder: Path) -> Path:
    """`path` with its folder resolved, if that is in the shared folder.

    Raises:
        InputError: otherwise. The server could make us read and delete any file.
    """
    shared = shared_folder.resolve()
    real = path.parent.resolve() / path.name
    if shared not in real.parents or path.name in ("", ".."):
        raise InputError(
            f"the server names {path}, outside the shared folder {shared}. Start it with "
            "`shared_storage_path` set to that folder, or pass --shared-folder; other paths are not read."
        )
    return real


def wait_until_written(file: Path) -> None:
    """Sleep until the server lets go of the companion lock; the kernel frees it if the server dies."""
    lock = file.with_name(file.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
    lock.unlink(missing_ok=True)


def _said(row: CaptureRow, answers: list[dict[str, Any]]) -> torch.Tensor:
    """[T] int64: the token that the server ranks first after each position, -1 where it was not asked.

    After the prompt's last token that is the one that it generated.
    """
    import torch

    said = torch.full_like(row.token_ids, -1)
    for answer, length in zip(answers, (MOST_LOGITS, len(row.token_ids))[-len(answers) :], strict=True):
        choice = answer["choices"][0]
        if not choice.get("token_ids"):
            raise InputError(
                "the server does not name the token that it generated (return_token_ids), by which its "
                "states are checked: it is no vLLM 0.32, or a proxy leaves the field out. Without that "
                "wrong states would pass unnoticed; --no-content-check takes them as they are."
            )
        said[length - 1] = choice["token_ids"][0]
        if before := choice.get("prompt_logprobs"):
            said[: length - 1] = torch.tensor(
                [next(int(token) for token, entry in at.items() if entry["rank"] == 1) for at in before[1:]]
            )
    return said
