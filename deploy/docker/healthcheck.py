#!/opt/tandem/bin/python -I
"""Ask the Tandem of this container whether it lives (`/live`), or for another path; exit 0 on 200, else 1.

    tandem-healthcheck [PATH]

The URL is that of TANDEM_HEALTH_URL, or worked out from the command line of process 1, so that no role,
port or certificate has to be said twice. Leaves out who may ask: both paths are open to all.
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
# Less than the image gives it.
TIMEOUT_S = 4.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(path: str) -> int:
    """Ask; return the exit status."""
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
    """Return where the server that was started with `argv` listens, as seen from beside it."""
    if url := environment.get("TANDEM_HEALTH_URL"):
        return url.rstrip("/")
    role = next((word for word in argv if word in DEFAULT_PORTS), "")
    host = given(argv, "--host").strip("[]") or "127.0.0.1"
    host = WILDCARDS.get(host, host)
    port = given(argv, "--port") or DEFAULT_PORTS.get(role, DEFAULT_PORT)
    scheme = "https" if given(argv, "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def given(argv: Sequence[str], flag: str) -> str:
    """Return the value of a flag, `--flag VALUE` or `--flag=VALUE`, the last one; empty without it."""
    value = ""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def unchecked() -> ssl.SSLContext:
    """Return a context for a certificate that is for another name than loopback's."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connects(url: str) -> int:
    """Look only whether somebody listens: an answer takes a certificate that we have not."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S):
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [DEFAULT_PATH]))
