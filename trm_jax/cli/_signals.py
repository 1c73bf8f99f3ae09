"""What signals and exit statuses mean to every command."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Self

__all__ = ["FAILED", "STOPPED", "StopOnSignal"]

STOPPED = 130
FAILED = 1  # some runs went non-finite, and the others are complete; or a server gave up


class StopOnSignal:
    """True once SIGINT or SIGTERM has come, which ``message`` answers; the second SIGINT ends at once."""

    def __init__(self, message: str) -> None:
        self._asked, self._message = False, message

    def __enter__(self) -> Self:
        self._before = [(number, signal.signal(number, self._handle)) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            # An exception would be lost in whatever callback of a library Python happens to run at this moment.
            os.write(2, b"trm-jax: interrupted\n")
            os._exit(STOPPED)
        self._asked = True
        os.write(2, f"\n{self._message} (Ctrl-C again ends at once)\n".encode())
