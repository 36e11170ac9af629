#!/opt/tandem/bin/python -I
"""Query the Tandem server of this container at `/live` or another path; exit 0 on status 200, else 1.

    tandem-healthcheck [PATH]

The URL is TANDEM_HEALTH_URL, or derived from the command line of process 1, so that role, port and
certificate need not be configured twice. Requests have no key, because health paths need none.
"""

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_PATH = "/live"
DEFAULT_PORTS = {"prefill": 7000, "decode": 7001}
DEFAULT_PORT = 8000  # lb, serve, up
# Lower than the timeout of HEALTHCHECK in the image.
TIMEOUT_S = 4.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(path: str) -> int:
    """Query the path; return the exit status."""
    argv = Path("/proc/1/cmdline").read_bytes().decode().split("\0")
    url = url_of(argv, os.environ)
    try:
        if given(argv, "--ssl-ca-certs"):
            return connects(url)
        with urllib.request.urlopen(url + path, timeout=TIMEOUT_S, context=unchecked()) as answer:  # noqa: S310 - our own URL
            return int(answer.status != 200)
    except (OSError, urllib.error.URLError) as error:
        sys.stderr.write(f"{url}{path}: {error}\n")
        return 1


def url_of(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the local URL of the server that was started with `argv`."""
    if url := environment.get("TANDEM_HEALTH_URL"):
        return url.rstrip("/")
    role = next((word for word in argv if word in DEFAULT_PORTS), "")
    host = given(argv, "--host").strip("[]") or "127.0.0.1"
    host = WILDCARDS.get(host, host)
    port = given(argv, "--port") or DEFAULT_PORTS.get(role, DEFAULT_PORT)
    scheme = "https" if given(argv, "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def given(argv: Sequence[str], flag: str) -> str:
    """Return the last value of a flag, `--flag VALUE` or `--flag=VALUE`; empty if it is absent."""
    value = ""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def unchecked() -> ssl.SSLContext:
    """Return a TLS context without verification: the certificate is not for loopback."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connects(url: str) -> int:
    """Check only that the port accepts connections: a request needs a client certificate. Return 0."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S):
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [DEFAULT_PATH]))
