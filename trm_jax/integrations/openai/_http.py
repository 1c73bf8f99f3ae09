"""JSON over HTTP, many requests at once: patient with a server that is away or busy, each answer used once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trm_jax.integrations.openai._options import ServerOptions

__all__ = ["Aborted", "Client", "ServerFailed"]

_AWAY = (502, 503, 504)
_ENDED = "ended with the requests beside it."
_BUSY = 429
_T = TypeVar("_T")


class ServerFailed(RuntimeError):
    """The server did not answer as asked, and asking again will not help."""


class Aborted(Exception):
    """The server gave up a request half-way (its weights were changed, or it was told to): ask again."""


class _Transient(Exception):
    """Asking again may help; ``away`` when the server may be another process by now."""

    def __init__(self, message: str, *, away: bool) -> None:
        super().__init__(message)
        self.away = away


class Client:
    """Blocking calls, made by threads with a connection for each request.

    An answer is used only when it has arrived whole, and a request has one answer however often it was asked, so no
    sample is lost or counted twice.

    Args:
      options: address, token, patience, concurrency.
      on_return: called once after the server was away and before it is asked again, e.g. to give it its weights anew.
    """

    def __init__(self, options: ServerOptions, on_return: Callable[[], None] | None = None) -> None:
        parts = urlsplit(options.address)
        self._host, self._port, self._options = parts.hostname, parts.port, options
        self._on_return = on_return
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=options.certificate)
        self._headers = {"Content-Type": "application/json"}
        if options.token is not None:
            self._headers["Authorization"] = f"Bearer {options.token}"
        self._live: set[http.client.HTTPConnection] = set()
        self._stop = threading.Event()
        self._lock, self._returning = threading.Lock(), threading.Lock()
        self._returned = 0.0

    def get(self, path: str) -> Any:
        """The answer to a GET.

        Raises:
          ServerFailed: there was none within the patience, or a refusal.
        """
        return self._patiently("GET", path, None, lambda answer: answer, notify=False)

    def ask(self, path: str, body: Any, read: Callable[[Any], _T], *, notify: bool = False) -> _T:
        """Posts ``body`` and returns what ``read`` makes of the answer; ``read`` may raise ``Aborted`` to ask again.

        Raises:
          ValueError: the server refused the request as malformed, or ``read`` did.
          ServerFailed: it failed, or stayed away or busy longer than the patience.
        """
        return self._patiently("POST", path, body, read, notify=notify)

    def ask_all(self, path: str, asked: Sequence[tuple[Any, Callable[[Any], _T]]]) -> list[_T]:
        """``ask`` for every ``(body, read)``, in order; the first that fails ends the others."""
        pool = concurrent.futures.ThreadPoolExecutor(min(self._options.concurrency, max(len(asked), 1)), "openai")
        futures = [pool.submit(self._patiently, "POST", path, body, read, notify=True) for body, read in asked]
        try:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            failed = [future for future in futures if future.done() and future.exception() is not None]
            for future in failed or futures:
                future.result()
            return [future.result() for future in futures]
        finally:  # after a failure or an interrupt the server shall not go on for nobody
            with self._lock:
                self._stop.set()
                for connection in self._live:
                    if connection.sock is not None:
                        with contextlib.suppress(OSError):
                            connection.sock.shutdown(socket.SHUT_RDWR)
            pool.shutdown(wait=True, cancel_futures=True)
            self._stop.clear()

    def _patiently(self, method: str, path: str, body: Any, read: Callable[[Any], _T], *, notify: bool) -> _T:
        began, wait = 0.0, 0.05
        while True:
            asked_at = time.monotonic()
            try:
                return read(self._once(method, path, body))
            except (_Transient, Aborted) as error:
                if self._stop.is_set():
                    raise ServerFailed(_ENDED) from error
                began = began or time.monotonic()
                if time.monotonic() - began > self._options.patience:
                    raise ServerFailed(
                        f"{self._options.address}{path}: {error} For {self._options.patience:g} s (patience) now."
                    ) from error
                self._stop.wait(wait)
                wait = min(2 * wait, 1.0)
                if notify and isinstance(error, _Transient) and error.away:
                    self._came_back(asked_at)

    def _came_back(self, asked_at: float) -> None:
        """Lets one of the requests that failed together call ``on_return``."""
        if self._on_return is None:
            return
        with self._returning:
            if self._returned < asked_at:
                self._on_return()
                self._returned = time.monotonic()

    def _once(self, method: str, path: str, body: Any) -> Any:
        timeout = self._options.timeout
        connection = (
            http.client.HTTPConnection(self._host or "", self._port, timeout=timeout)
            if self._tls is None
            else http.client.HTTPSConnection(self._host or "", self._port, timeout=timeout, context=self._tls)
        )
        try:
            connection.connect()
            with self._lock:
                if self._stop.is_set():
                    raise ServerFailed(_ENDED)
                self._live.add(connection)
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except ssl.SSLCertVerificationError as error:
            raise ServerFailed(f"{self._options.address}: {error.verify_message}; set certificate.") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Transient(f"no answer ({type(error).__name__}: {error}).", away=True) from error
        finally:
            with self._lock:
                self._live.discard(connection)
            connection.close()
        if status == _BUSY or status in _AWAY:
            raise _Transient(f"status {status}: {_message(text)}", away=status != _BUSY)
        where = f"{self._options.address}{path}"
        if status in (400, 413, 422):
            raise ValueError(f"{where} refused: {_message(text)}")
        if status != 200:
            raise ServerFailed(f"{where} answered status {status}: {_message(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerFailed(f"{where} answered something that is not JSON: {_message(text)}") from error


def _message(text: bytes) -> str:
    """The server's own words in an error."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        return text[:200].decode(errors="replace")
