"""A real browser, and what every test asks of the page whatever else it looks at."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.patience import PATIENCE_S

CHROMIUM = "/usr/bin/chromium"
# Those of a container without a GPU; and nothing that would speak to anybody on its own.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
# What a browser says by itself when the router is away or wants a key.
EXPECTED = re.compile("Failed to load resource|ERR_CONNECTION_REFUSED")
PATIENCE_MS = PATIENCE_S * 1000
INIT = """
// The page gives an answer up after a few seconds, for which a machine may stand still. A stage that is gone refuses.
AbortSignal.timeout = () => new AbortController().signal;
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a URL in a context of its own.

    No page may ask another host for anything, break its own policy, or raise.
    """
    complaints: list[str] = []
    pages: list[Page] = []

    def watch(page: Page, url: str) -> None:
        host = "/".join(url.split("/")[:3])
        page.on("pageerror", lambda error: complaints.append(f"raised: {error}"))
        page.on(
            "console",
            lambda said: (
                said.type in {"error", "warning"}
                and not EXPECTED.search(said.text)
                and complaints.append(f"console: {said.text}")
            ),
        )
        page.on(
            "request",
            lambda sent: sent.url.startswith(host) or complaints.append(f"asks {sent.url}"),
        )

    def open_(url: str, **settings) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | settings)
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(INIT)
        page = context.new_page()
        watch(page, url)
        page.goto(url)
        pages.append(page)
        return page

    yield open_
    for page in pages:
        complaints += page.evaluate("window.violations")
        page.context.close()
    assert complaints == []
