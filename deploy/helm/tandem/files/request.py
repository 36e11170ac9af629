"""Sends one chat request to the router and checks the response. Uses only the standard library."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KEYS = Path("/etc/tandem/keys/api-keys")


def headers() -> dict[str, str]:
    """Return the headers of each request, with the first API key if clients need one."""
    found = {"Content-Type": "application/json"}
    lines = [line.strip() for line in KEYS.read_text().splitlines()] if KEYS.exists() else []
    if keys := [line for line in lines if line and not line.startswith("#")]:
        found["Authorization"] = f"Bearer {keys[0]}"
    return found


def ask(url: str, body: dict[str, object] | None, timeout_s: float) -> dict[str, object]:
    """Return the decoded response to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers())
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def wait_until_served(router: str, deadline: float) -> None:
    """Wait until a pair of nodes serves.

    Raises:
        OSError: No pair serves before the deadline.
    """
    while True:
        try:
            ask(f"{router}/health", None, 10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return


def main() -> None:
    """Send the request and print the response; exit with 1 and a message if it is invalid."""
    router, prompt = os.environ["ROUTER_URL"], os.environ["PROMPT"]
    deadline = time.monotonic() + float(os.environ["TIMEOUT_S"])
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 32}
    try:
        wait_until_served(router, deadline)
        left_s = max(1.0, deadline - time.monotonic())
        answer = ask(f"{router}/v1/chat/completions", body, left_s)
    except urllib.error.HTTPError as error:
        sys.exit(f"FAILED: {error.url}: {error.code} {error.read().decode()}")
    except OSError as error:
        sys.exit(f"FAILED: {router}: {error}")
    content = answer["choices"][0]["message"]["content"]
    num_tokens = answer["usage"]["completion_tokens"]
    if not content.strip() or not 0 < num_tokens <= 32:
        sys.exit(f"FAILED: an answer without text: {json.dumps(answer)}")
    print(f"OK: {answer['model']} answered {num_tokens} tokens: {content!r}")


main()
