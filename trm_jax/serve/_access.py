"""Who may connect: the rules of an address, a certificate and a bearer token."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import ssl
from pathlib import Path

__all__ = ["Access", "check_authority", "is_loopback", "read_token"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name that is resolved elsewhere
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Where a server listens and whom it answers.

    Attributes:
      host: address; only loopback without TLS and a token.
      port: 0 takes a free one.
      certificate: PEM file of the server's certificate chain.
      key: PEM file of its private key.
      token_file: file whose one line is the bearer token that clients must send; also honoured on loopback.
      insecure: listen on another address without TLS or token all the same.

    Raises:
      ValueError: an address others can reach without TLS and a token; half a TLS identity, or files that are none; a
        token below 16 characters or a token file that others can read.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: must lie in [0, 65535]; 0 takes a free one.")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS needs both a certificate and its key; one of them is missing.")
        if self.certificate is not None and self.key is not None:
            _check_identity(self.certificate, self.key)
        if self.token_file is not None:
            self.token()
        if self.insecure or is_loopback(self.host):
            return
        missing = [
            name
            for name, given in (("a TLS certificate and key", self.certificate), ("a token file", self.token_file))
            if given is None
        ]
        if missing:
            raise ValueError(
                f"host={self.host!r} can be reached by others, and {' and '.join(missing)} is missing. Give them, "
                "listen on 127.0.0.1, or say insecure if the network itself is closed."
            )

    def token(self) -> str | None:
        """The bearer token, or None."""
        return None if self.token_file is None else read_token(self.token_file)

    @property
    def address(self) -> str:
        """``host:port`` as gRPC writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _check_identity(certificate: Path, key: Path) -> None:
    """In words and before anything starts; gRPC would only say that it cannot listen."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"certificate {str(certificate)!r} and key {str(key)!r} are no TLS identity ({error}): give PEM files that "
            "belong together, the key without a password."
        ) from error


def check_authority(certificate: Path) -> None:
    """Refuses what no server's certificate can be verified with.

    Raises:
      ValueError: the file cannot be read, or holds no certificate.
    """
    try:
        ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise ValueError(f"certificate {str(certificate)!r} is no PEM file of an authority ({error}).") from error


def read_token(path: Path) -> str:
    """The bearer token in a file.

    Raises:
      ValueError: the file cannot be read, can be read by others, or holds no such token.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read the token file {str(path)!r}: {error.strerror}") from error
    if os.name == "posix" and mode & 0o077:
        raise ValueError(f"token file {str(path)!r} can be read by others: chmod 600 it.")
    if len(text) < 16 or not text.isascii() or any(character.isspace() for character in text):
        raise ValueError(f"token file {str(path)!r}: one line of at least 16 ASCII characters is needed.")
    return text
