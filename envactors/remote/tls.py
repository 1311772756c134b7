"""Certificates of a node, as they travel to its agent, and what the agent makes of them."""

from __future__ import annotations

import contextlib
import ssl
from contextlib import AbstractContextManager
from typing import NamedTuple

from envactors.system.memory import file_of_text


class Certificates(NamedTuple):
    """Certificates in PEM format, each as the name of a file or as the text itself, which has several lines.

    Attributes:
        ca: Those that vouch for the caller's.
        cert: The node's own.
        key: Its private key; None if that is in ``cert``.
        ciphers: Which ciphers may be used; None for Python's default.
    """

    ca: str
    cert: str
    key: str | None = None
    ciphers: str | None = None


def make_server_context(certificates: Certificates) -> ssl.SSLContext:
    """Return the agent's side of encrypted links, which admits only callers with a certificate of the same cluster.

    Raises:
        OSError: A file cannot be read, or is no certificate.
    """
    ca, cert, key, ciphers = certificates
    where = {"cadata": ca} if _is_text(ca) else {"cafile": ca}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, **where)
    context.verify_mode = ssl.CERT_REQUIRED
    # Python 3.13 refuses certificates without key identifiers otherwise, such as Dask's temporary ones.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with _as_file(cert) as cert_file, contextlib.nullcontext() if key is None else _as_file(key) as key_file:
        context.load_cert_chain(cert_file, key_file)
    if ciphers:
        context.set_ciphers(ciphers)
    return context


def _is_text(value: str) -> bool:
    return "\n" in value


def _as_file(value: str) -> AbstractContextManager[str]:
    """Return the name of the file, or of a file with this text."""
    return file_of_text("envactors-pem", value) if _is_text(value) else contextlib.nullcontext(value)
