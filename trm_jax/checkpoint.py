"""Checkpoints that are whole or absent, and verified before they are trusted.

A checkpoint is a directory ``step_00000040``: ``arrays/`` (Orbax), ``layout.json`` (type and shape of every array),
``state.json`` (data iterator, versions, settings) and ``manifest.json`` (size and SHA-256 of every other file). It is
written under another name, flushed, and renamed, so a kill at any moment leaves the earlier checkpoints as they were.
Orbax casts to another type, and restores a flipped bit, without complaint; layout and manifest do not. A checkpoint
that fails its manifest is passed over, aloud, for the one before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

__all__ = ["CheckpointError", "Checkpointer"]

_PREFIX = "step_"
_ORBAX = threading.Lock()
"""Two saves at once, of two directories even, wait for each other's signals, which Orbax numbers in one sequence."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class Checkpointer:
    """Saves and restores ``(arrays, state)`` under one directory.

    Args:
      directory: made when absent.
      keep: newest checkpoints kept; at least 1.
      report: called with a sentence when something is passed over; default a warning.
    """

    def __init__(self, directory: Path, *, keep: int = 2, report: Callable[[str], None] | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept.")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._report = report if report is not None else lambda text: warnings.warn(text, stacklevel=3)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the checkpoint directory {self._directory}: {error.strerror}. Choose a writable one."
            ) from error

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first (not yet verified)."""
        found = []
        for path in self._directory.glob(f"{_PREFIX}*"):
            digits = path.name.removeprefix(_PREFIX)
            if digits.isdigit() and (path / "manifest.json").is_file():
                found.append(int(digits))
        return sorted(found)

    def save(self, step: int, arrays: Any, state: dict[str, Any]) -> Path:
        """Writes one checkpoint and removes those beyond ``keep``.

        Args:
          step: its number; an existing checkpoint of that step is replaced.
          arrays: pytree of ``jax.Array`` and numpy arrays.
          state: JSON-able.

        Returns:
          Its directory.

        Raises:
          CheckpointError: when the disk refuses (full, read-only). Earlier checkpoints are untouched.
        """
        final = self._path(step)
        partial = final.with_name(f"{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            named = _by_path(arrays)
            with _ORBAX, _orbax_keeps_its_tracebacks(), ocp.StandardCheckpointer() as writer:
                writer.save(partial / "arrays", named)
            (partial / "layout.json").write_text(json.dumps(_layout(named), indent=1), encoding="utf-8")
            (partial / "state.json").write_text(json.dumps(state, sort_keys=True, indent=1), encoding="utf-8")
            manifest = _manifest(partial)
            (partial / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=1), encoding="utf-8")
            _flush(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _flush_directory(self._directory)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, OSError) and not _is_disk_error(error):
                raise
            raise CheckpointError(
                f"could not write checkpoint {final.name} under {self._directory}: {_one_line(error)}. Free some space "
                f"there, then continue with --resume. Kept: {self._names() or 'none'}."
            ) from error
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final

    def restore_latest(self, template: Callable[[dict[str, Any]], Any]) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest checkpoint that passes its manifest.

        Args:
          template: from a checkpoint's ``state`` to the pytree (of arrays or ``jax.ShapeDtypeStruct``, with shardings)
            that its arrays must match.

        Returns:
          ``(step, arrays, state)``, or None when there is no checkpoint at all.

        Raises:
          CheckpointError: when there are checkpoints but none can be trusted, or the newest good one does not fit
            ``template``.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self._path(step)
            fault = verify(path)
            if fault:
                rest = "trying the one before it" if step != steps[0] else "there is none before it"
                self._report(f"checkpoint {path.name} is damaged ({fault}); {rest}.")
                continue
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            try:
                expected = template(state)
                named = _by_path(jax.tree.map(_abstract, expected))
                _check_layout(json.loads((path / "layout.json").read_text(encoding="utf-8")), _layout(named))
                with _ORBAX, ocp.StandardCheckpointer() as reader:
                    flat = reader.restore(path / "arrays", named)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"checkpoint {path} does not fit this configuration's model and optimizer: {_one_line(error)}. "
                    "Resume with the configuration that wrote it, or choose another directory."
                ) from error
            arrays = jax.tree.unflatten(jax.tree.structure(expected), [flat[name] for name in _by_path(expected)])
            return step, arrays, state
        if steps:
            raise CheckpointError(
                f"none of the checkpoints under {self._directory} passes its manifest ({self._names()}). "
                "Restore the directory from a copy, or start anew in another one."
            )
        return None

    def digest(self, step: int) -> str:
        """SHA-256 of a checkpoint's manifest, which has that of every file: what tells two checkpoints apart."""
        return hashlib.sha256((self._path(step) / "manifest.json").read_bytes()).hexdigest()

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step:08d}"

    def _names(self) -> str:
        return ", ".join(self._path(step).name for step in self.steps())


def verify(path: Path) -> str:
    """Compares a checkpoint with its manifest; the first fault in words, or an empty string."""
    try:
        expected = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        found = _manifest(path)
    except (OSError, ValueError) as error:
        return f"unreadable: {error}"
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not in the manifest"
        if expected[name] != found[name]:
            return f"{name} differs from its recorded SHA-256"
    return ""


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    out = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        if name != "manifest.json":
            with file.open("rb") as stream:
                out[name] = {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    return out


def _flush(path: Path) -> None:
    for item in path.rglob("*"):
        if item.is_file():
            descriptor = os.open(item, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        else:
            _flush_directory(item)
    _flush_directory(path)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _orbax_keeps_its_tracebacks() -> Iterator[None]:
    """Orbax's threads log the traceback of an error and then raise it here; it is enough to see it once, in words."""

    def not_of_orbax(record: logging.LogRecord) -> bool:
        return "/orbax/" not in record.pathname.replace(os.sep, "/")

    logger = logging.getLogger("absl")
    logger.addFilter(not_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(not_of_orbax)


def _is_disk_error(error: Exception) -> bool:
    """Tensorstore reports the operating system's refusals in words, with the error's number."""
    return "os_error_code=" in str(error)


def _one_line(error: Exception) -> str:
    """The gist of an error: Orbax and Tensorstore quote whole trees and paths."""
    refused = re.search(r"os_error_code='(\d+)'", str(error))
    if refused:
        return os.strerror(int(refused[1]))
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves by their path, in order: a layout on disk that does not depend on container classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two arrays of this tree have the same path once its keys are joined by dots; rename one.")
    return named


def _layout(named: dict[str, Any]) -> dict[str, str]:
    return {name: f"{jax.numpy.dtype(x.dtype).name}{list(x.shape)}" for name, x in named.items()}


def _check_layout(held: dict[str, str], wanted: dict[str, str]) -> None:
    for name in [*wanted, *held]:
        if held.get(name) != wanted.get(name):
            raise ValueError(f"{name} is {held.get(name, 'absent')} there and {wanted.get(name, 'absent')} here")


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return x
