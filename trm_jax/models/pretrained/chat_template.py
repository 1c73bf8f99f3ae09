"""Chat templates, run in a sandbox in a process of their own: no template can hang, fill or reach this one."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["render_template"]

_PROGRAM = Path(__file__).with_name("_template_worker.py")
_START_SECONDS = 60.0
_SECONDS = 10.0
_MAX_CHARS = 2**22


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Renders a Jinja template as Transformers does.

    ``trim_blocks`` and ``lstrip_blocks`` are on; ``break`` and ``continue``, ``{% generation %}``, ``raise_exception``,
    ``strftime_now`` and a ``tojson`` without HTML escapes are there. Variables are immutable.

    Args:
      source: the template.
      variables: what it sees, JSON-able.

    Returns:
      Its text, at most 4 Mi characters.

    Raises:
      ValueError: the template refused (``raise_exception``), is malformed, reaches for what the sandbox forbids, or
        takes more than 10 seconds, 1 GiB or 4 Mi characters.
      ImportError: without the extra ``pretrained``.

    Example:
      >>> render_template("{% for m in messages %}[{{ m.role }}] {{ m.content | tojson }}{% endfor %}",
      ...                 {"messages": [{"role": "user", "content": "<7>"}]})
      '[user] "<7>"'
    """
    reply = _SHARED.ask({"template": source, "variables": dict(variables)})
    if "refused" in reply:
        raise ValueError(f"The chat template refused these messages: {reply['refused']}")
    if "error" in reply:
        raise ValueError(f"The chat template failed: {reply['error']}")
    return str(reply["text"])


class _Renderer:
    """The process, started when it is first needed and again when it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._received = b""

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._start()
            try:
                reply = self._exchange(line, _SECONDS)
            except BaseException:
                self.stop()  # a late reply would answer the next request
                raise
            if reply is None:
                self.stop()
                return {"error": f"it takes more than {_SECONDS:g} seconds, or more memory than it may"}
            return reply

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("Chat templates need 'jinja2': pip install 'trm-jax[pretrained]'.")
        self.stop()
        self._received, self._owner = b"", os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(int(_SECONDS)), str(_MAX_CHARS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._exchange(b"", _START_SECONDS) is None:
            self.stop()
            raise RuntimeError(f"the process for chat templates was not ready after {_START_SECONDS:g} seconds")

    def _exchange(self, line: bytes, seconds: float) -> dict[str, str] | None:
        """Sends a request and waits for its reply; None when there is none in time, or the process ended."""
        process, deadline = self._process, time.monotonic() + seconds
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while line:
                line = line[process.stdin.write(line) :]
        except OSError:
            return None
        while b"\n" not in self._received:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(process.stdout.fileno(), 2**20) if ready else b""
            if not got:
                return None
            self._received += got
        reply, self._received = self._received.split(b"\n", 1)
        decoded: dict[str, str] = json.loads(reply)
        return decoded


_SHARED = _Renderer()
atexit.register(_SHARED.stop)
