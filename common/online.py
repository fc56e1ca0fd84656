"""Training states straight from a server, through speculators' own on-missing path; nothing is stored."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hs_connectors import FileTransfer

from common import capture_vllm, log, vllm_server
from common.capture import Capture, Rows
from common.content_check import ContentCheck
from common.errors import InputError
from common.hidden_states import HiddenStateStore
from common.verifier import Verifier

_LOG = log.get("online")
_OUTAGE_S = 60.0


@dataclass(frozen=True)
class OnlineStates:
    """A server that computes the states of each row when training comes to it.

    Attributes:
        url: its OpenAI-compatible address, ending in /v1.
        rows: of the data set.
        store: its folder is the one that the server writes into; files stay there for a moment only.
        layer_ids: the three aux ids and N.
        server_command: what starts such a server.
    """

    url: str
    rows: Rows
    store: HiddenStateStore
    layer_ids: list[int]
    server_command: list[str]

    @classmethod
    def settle(
        cls, args: argparse.Namespace, folder: Path, model: Verifier, inherited: list[int] | None
    ) -> OnlineStates:
        """Settle what is asked of which server.

        Args:
            args: `--endpoint`, `--shared-folder`, `--layer-ids`.
            folder: the run folder to read from.
            model: the verifier.
            inherited: layer ids that the data set's maker recorded.

        Raises:
            InputError: a flag is missing or wrong.
        """
        if not args.endpoint:
            raise InputError("--hidden-states online needs a server: pass --endpoint URL")
        ids = model.settle_layer_ids(args.layer_ids, inherited, three=True)
        rows = Rows.load(folder / "dataset")
        shared = args.shared_folder or folder / "hidden_states" / ".incoming"
        capture = vllm_server.capture_args(ids, model.num_layers, shared)
        command = vllm_server.command(model, [*capture, "--max-model-len", str(rows.longest + 1)], 8000)
        store = HiddenStateStore(shared, model.hidden_size)
        return cls(vllm_server.base_url(args.endpoint), rows, store, [*ids, model.num_layers], command)

    @property
    def transfer(self) -> ServerTransfer:
        """What speculators' data set fetches states with."""
        return ServerTransfer(self.store, self.layer_ids, self.server_command)

    def prove(self, model: Verifier) -> None:
        """Compare the first rows with the server's own words before a step is made.

        Args:
            model: the verifier, whose norm and head must give what the server predicts.

        Raises:
            InputError: the server does not answer, does not capture, or captures other layers.
            StageError: its states are not the verifier's.
        """
        self.store.folder.mkdir(parents=True, exist_ok=True)
        few = self.rows.to_judge_by(self.rows.lengths)
        with tempfile.TemporaryDirectory(dir=self.store.folder, prefix=".proof-") as folder:
            store = replace(self.store, folder=Path(folder))
            backend = capture_vllm.connected(
                [self.url],
                model.name,
                store,
                self.store.folder,
                self.layer_ids,
                self.server_command,
                longest=self.rows.longest,
                concurrency=len(few),
                outage_s=_OUTAGE_S,
            )
            proof = Capture(self.rows.only(few), store, ContentCheck.of(model), max_failure_rate=0.0)
            asyncio.run(proof.run(backend, few))


class ServerTransfer(FileTransfer):
    """Fetches what a server has written, checks its form as 03 does, and leaves no file behind.

    speculators' own reads and deletes any path that a server names.

    Args:
        store: its folder is the only one that files are taken from.
        layer_ids: the three aux ids and N.
        server_command: what starts such a server, for error messages.
    """

    def __init__(
        self, store: HiddenStateStore, layer_ids: Sequence[int], server_command: Sequence[str]
    ) -> None:
        super().__init__(store.folder)
        self._store, self._layer_ids, self._server_command = store, layer_ids, server_command

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """None: nothing is stored."""
        return None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """A row's `token_ids [T]` int64 and `hidden_states [T, A+1, H]` bfloat16.

        Raises:
            InputError: the server captures other layers, or names a path outside the shared folder.
            Damaged: the states are not of the form that 03 would store.
        """
        answer = {"kv_transfer_params": hs_transfer_params}
        file = capture_vllm.server_file(answer, self._store.folder, self._layer_ids, self._server_command)
        capture_vllm.wait_until_written(file)
        token_ids, states = self._store.consume(file)
        return {"token_ids": token_ids, "hidden_states": states}

    def delete(self, handle: str) -> None:
        """Nothing: `get_generated` has removed what could be read, and other paths are not ours to remove."""
