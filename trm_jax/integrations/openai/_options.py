"""Where a server is, what it is, and how it is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["Cuts", "DialectName", "LogpMode", "ServerOptions"]

DialectName = Literal["vllm", "sglang", "llama.cpp"]
"""Whose requests and answers the server speaks."""

LogpMode = Literal["raw", "tempered", "processed"]
"""What a server's log-probs are of: the model at temperature 1 over the whole vocabulary ("raw"), the model at the
sampling temperature over the whole vocabulary ("tempered"), or the distribution drawn from ("processed")."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server and the manners of its client.

    Attributes:
      address: ``http://host:port`` or ``https://host:port``.
      model: name under which the server knows the model; None takes the only one that it lists.
      dialect: what it speaks; None asks ``/v1/models`` who it is.
      token: bearer token; without TLS only for a server on this machine.
      certificate: PEM file of the authority that signed the server's certificate; None takes the system's.
      concurrency: requests in flight.
      patience: seconds that a server may stay away or busy before a request fails.
      timeout: seconds that one answer may take.
      group_samples: ask for all samples of a prompt in one request. vLLM and llama.cpp then give sample ``i`` the seed
        of the first plus ``i``: a row's own seed counts only where it is its prompt's first. SGLang keeps every seed.
      seeded: send seeds. vLLM on TPU refuses them.
      logps: what the server's log-probs are said to be; held against the measurement, which decides.
      faulty_rows: a response without a usable record "raise"s, or keeps its tokens and gets NaN for log-probs ("drop"),
        which every correction rejects and counts. More than half of a batch raises in any case.

    Raises:
      ValueError: naming field, value and rule.
    """

    address: str
    model: str | None = None
    dialect: DialectName | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    certificate: Path | None = None
    concurrency: int = 64
    patience: float = 120.0
    timeout: float = 600.0
    group_samples: bool = True
    seeded: bool = True
    logps: Literal["raw", "processed"] | None = None
    faulty_rows: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/"):
            raise ValueError(
                f"address={self.address!r}: must be http://host:port or https://host:port, without a path."
            )
        if self.token is not None and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ValueError(f"address={self.address!r}: a token would cross the network in the clear; use https.")
        if self.concurrency < 1 or not self.patience >= 0 or not self.timeout > 0:
            raise ValueError("concurrency must be at least 1, patience at least 0, timeout above 0.")
        for name, allowed in (
            ("dialect", (None, "vllm", "sglang", "llama.cpp")),
            ("logps", (None, "raw", "processed")),
            ("faulty_rows", ("raise", "drop")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cuts:
    """Truncation beside top-p, and how much of what is left is recorded.

    Attributes:
      top_k: most likely tokens kept; 0 keeps all.
      min_p: tokens below this share of the largest probability are cut; in [0, 1).
      support_tokens: top log-probs asked for at every token, from which the tokens that could be drawn are recorded, as
        training on cut samples needs; 0 records none. A response whose support is larger is faulty.

    Raises:
      ValueError: naming field, value and rule; top-k or min-p without the record of what they left.
    """

    top_k: int = 0
    min_p: float = 0.0
    support_tokens: int = 0

    def __post_init__(self) -> None:
        if self.top_k < 0 or self.support_tokens < 0 or not 0 <= self.min_p < 1:
            raise ValueError(f"{self}: top_k and support_tokens must be at least 0, min_p in [0, 1).")
        if (self.top_k or self.min_p) and not self.support_tokens:
            raise ValueError(
                f"top_k={self.top_k}, min_p={self.min_p} cut the distribution: set support_tokens (at least top_k), so "
                "that the tokens left are recorded and the training side can apply the same cut."
            )
        if 0 < self.support_tokens < self.top_k:
            raise ValueError(f"support_tokens={self.support_tokens}: must be at least top_k={self.top_k}.")
