"""TLS of the server, from files that the operator named."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import Flag


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a server's PEM files.

    Attributes:
        certfile: The certificate, and those between it and the authority.
        keyfile: Empty where `certfile` holds the key too.
        ca_certs: Empty: clients need no certificate.
    """

    certfile: Annotated[
        str, Flag("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate")
    ] = ""
    keyfile: Annotated[str, Flag("--ssl-keyfile", metavar="FILE", help="the certificate's key")] = (
        ""
    )
    ca_certs: Annotated[
        str,
        Flag(
            "--ssl-ca-certs",
            metavar="FILE",
            help="require client certificates of these authorities",
        ),
    ] = ""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server: TLS 1.2 and above, as Python's defaults."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Otherwise clients may choose HTTP/2, which the server does not have.
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("--ssl-certfile", files.certfile)
    if files.keyfile:
        _check_readable("--ssl-keyfile", files.keyfile)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.certfile, files.keyfile or None, password="")
    except OSError as error:
        raise ConfigInvalid(_chain_sentence(files, error)) from error
    if files.ca_certs:
        load_authorities(context, "--ssl-ca-certs", files.ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_authorities(context: ssl.SSLContext, flag: str, path: str) -> None:
    """Make `context` trust the certificates in a file."""
    _check_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: holds no certificates in PEM form") from error


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: {error.strerror}") from error


def _chain_sentence(files: TlsFiles, error: OSError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"--ssl-keyfile {files.keyfile}: is not the key of {files.certfile}"
    if not files.keyfile:
        return (
            f"--ssl-certfile {files.certfile}: needs a certificate and its key, unencrypted and in "
            "PEM form; give the key with --ssl-keyfile where it is in a file of its own"
        )
    return (
        f"--ssl-certfile {files.certfile} and --ssl-keyfile {files.keyfile}: need a certificate and "
        "its key, unencrypted and in PEM form"
    )
