"""The certificates of a node, and the TLS context that its agent makes from them."""

from __future__ import annotations

import contextlib
import ssl
from contextlib import AbstractContextManager
from typing import NamedTuple

from envactors.system.memory import file_of_text


class Certificates(NamedTuple):
    """Certificates in PEM format, each either as the name of a file or as its text of several lines.

    Attributes:
        ca: The certificates of the authorities that sign callers' certificates.
        cert: The node's certificate.
        key: The node's private key; None if it is in ``cert``.
        ciphers: The accepted ciphers; None for Python's default.
    """

    ca: str
    cert: str
    key: str | None = None
    ciphers: str | None = None


def make_server_context(certificates: Certificates) -> ssl.SSLContext:
    """Return the agent's TLS context, which admits only callers with a certificate of the same cluster.

    Raises:
        OSError: A file cannot be read, or does not contain a certificate.
    """
    ca, cert, key, ciphers = certificates
    where = {"cadata": ca} if _is_text(ca) else {"cafile": ca}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, **where)
    context.verify_mode = ssl.CERT_REQUIRED
    # Otherwise Python 3.13 refuses certificates without key identifiers, such as Dask's temporary ones.
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
