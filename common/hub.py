"""A folder of this machine or a repository of the hub, by one name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.errors import InputError


def folder(
    name: str, revision: str | None, *, flag: str, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> Path:
    """The folder that `name` means, downloaded (or found in the hub's cache) where it is a hub id.

    Args:
        name: path or hub id.
        revision: hub branch, tag or commit; None for the main branch.
        flag: where the user gave `name`, for the error.
        patterns: files to download.
        ignored: files not to download.

    Raises:
        InputError: it is neither a folder nor a repository within reach.
    """
    if Path(name).is_dir():
        return Path(name)
    refuse_missing_path(name, flag)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
    except (OSError, HFValidationError, ValueError) as error:
        raise InputError(
            f"{flag} {name} is neither a file, a folder, nor a hub repository within reach: {error}"
        ) from None
    return Path(found)


def refuse_missing_path(name: str, flag: str) -> None:
    """Stop at once at a path that does not exist: the hub would be asked for it, and without a network
    that takes most of a minute.

    Args:
        name: path or hub id; `ORGANISATION/MODEL` may be either and passes.
        flag: where the user gave it.

    Raises:
        InputError: it has the form of a path and nothing is there.
    """
    is_path = name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path and not Path(name).exists():
        raise InputError(
            f"{flag} {name}: no such file or folder. Correct the path (relative ones start at {Path.cwd()}), "
            "or pass a hub id of the form ORGANISATION/MODEL."
        )
