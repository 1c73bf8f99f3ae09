"""Weights between processes: a directory a version, written by the trainer, verified by the server before it is used.

A server is told a version, never a path: it reads ``root/version_00000012`` and nothing else. What is half written has
no checkpoint in it yet, and what is damaged fails its manifest of SHA-256 hashes; both are refused. A number does not
tell one run's version from another's: the identity of what was written does, and goes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trm_jax.checkpoint import Checkpointer, CheckpointError

__all__ = ["WeightDirectory", "WeightsRefused"]

_NAME = re.compile(r"version_(\d{8})")


class WeightsRefused(RuntimeError):
    """A version is absent, half written, damaged, of another model, or not the one that was meant."""


class WeightDirectory:
    """Versions of the policy's parameters under one root, as Orbax checkpoints with a hash manifest.

    Args:
      root: on a file system that trainer and server share; made when absent.
      keep: newest versions that ``publish`` keeps of those that it wrote.
    """

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        self._root, self._keep = Path(root).absolute(), keep
        self._written: list[int] = []

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """For its one writer: keeps others out, and removes the versions that an earlier one left behind.

        The kernel lets go when the process ends, however it ends.

        Raises:
          ValueError: another writer has it, or it cannot be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            lock = (self._root / ".writer").open("w")
        except OSError as error:
            raise ValueError(f"cannot write to the weight directory {str(self._root)!r}: {error.strerror}.") from error
        with lock:
            self._lock(lock, fcntl.LOCK_EX)
            for version in self.versions():
                shutil.rmtree(self._path(version), ignore_errors=True)
            yield

    def check_free(self) -> None:
        """Whether a writer could have it now; nothing is made or removed.

        Raises:
          ValueError: another writer has it.
        """
        with contextlib.suppress(OSError), (self._root / ".writer").open() as lock:
            self._lock(lock, fcntl.LOCK_SH)

    def _lock(self, file: IO[str], kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another trainer writes its weights to {str(self._root)!r}: a server follows one at a time. Wait for "
                "it, or start another server with a directory of its own."
            ) from error

    def publish(self, version: int, params: Any) -> Path:
        """Writes a version, whole or not at all.

        Raises:
          ValueError: a version outside ``[0, 10^8)``.
          CheckpointError: the disk refused.
        """
        path = self._path(version)
        Checkpointer(path, keep=1).save(version, params, {})
        self._written = [*(v for v in self._written if v != version), version]
        for old in self._written[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        self._written = self._written[-self._keep :]
        return path

    def identity(self, version: int) -> str:
        """What tells these weights from all others: SHA-256 of the manifest, which has the hash of every file.

        Raises:
          WeightsRefused: absent or half written.
        """
        path = self._path(version)
        if not path.is_dir():
            raise WeightsRefused(
                f"there is no policy version {version} in the weight directory (looked for {path.name})."
            )
        try:
            return Checkpointer(path, keep=1).digest(version)
        except OSError as error:
            raise WeightsRefused(
                f"policy version {version} is not complete: {path.name} holds no whole checkpoint."
            ) from error

    def read(self, version: int, template: Any, *, identity: str | None = None) -> Any:
        """The parameters of a version.

        Args:
          version: its number.
          template: pytree of arrays or ``jax.ShapeDtypeStruct`` that they must match.
          identity: that they must have; None takes any.

        Raises:
          WeightsRefused: absent, half written, damaged, not of this model, or of another identity.
        """
        wanted = self.identity(version) if identity is None else identity
        self._compare(version, wanted)
        path = self._path(version)
        faults: list[str] = []
        try:
            found = Checkpointer(path, keep=1, report=faults.append).restore_latest(lambda _: template)
        except CheckpointError as error:
            told = " ".join(faults) or str(error)
            raise WeightsRefused(f"policy version {version}: {told.replace(f'{self._root}/', '')}") from error
        except Exception as error:  # who writes there may write anything: valid hashes of nonsense, too
            raise WeightsRefused(f"policy version {version} cannot be read: {type(error).__name__}.") from error
        if found is None:
            raise WeightsRefused(f"policy version {version} is not complete: {path.name} holds no whole checkpoint.")
        self._compare(version, wanted)  # nobody wrote it anew meanwhile
        return found[1]

    def versions(self) -> list[int]:
        """Versions that have a directory, oldest first (not verified)."""
        matches = (_NAME.fullmatch(path.name) for path in self._root.glob("version_*"))
        return sorted(int(match[1]) for match in matches if match)

    def _compare(self, version: int, wanted: str) -> None:
        found = self.identity(version)
        if found != wanted:
            raise WeightsRefused(
                f"policy version {version} in the weight directory is {found[:12]}..., and {wanted[:12]}... is meant: "
                "another run wrote it. Start the server with the directory that the trainer writes to (its "
                "rollout.weights)."
            )

    def _path(self, version: int) -> Path:
        if not 0 <= version < 10**8:
            raise ValueError(f"policy version {version}: must lie in [0, 10^8).")
        return self._root / f"version_{version:08d}"
