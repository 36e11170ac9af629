"""Makes the pictures of docs/images: `python -m tests.browser.pictures DIRECTORY`.

They show a real cluster of simulated engines under a load, in which a node dies.
"""

import base64
import json
import random
import signal
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS
from tests.e2e.cluster import running_cluster

PROFILE = """{"prefill": {"base_ms": 8, "per_token_ms": 0.12}, "decode": {"base_ms": 14, "per_request_ms": 0.4}}"""
TALL = {"width": 1440, "height": 1900}
WIDE, NARROW = {"width": 1440, "height": 1010}, {"width": 400, "height": 860}
NUM_CLIENTS = 8
WARM_UP_MS = 40_000


def client(url: str, number: int, stopping: threading.Event) -> None:
    """Ask for completions of all kinds, one after the other."""
    rng = random.Random(number)
    while not stopping.is_set():
        prompt = f"{rng.random()} " + "word " * rng.choice([20, 80, 300, 900])
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": prompt,
            "max_tokens": rng.choice([20, 60, 150]),
        }
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(sent, timeout=60) as response:
            response.read()
        stopping.wait(rng.random() / 2)


def new_page(browser: Browser, url: str, scheme: str, size: dict) -> Page:
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    expect(page.locator(".node")).to_have_count(5)
    return page


def save(page: Page, path: Path, clip: dict | None = None) -> None:
    """Save what is seen as WebP, which Playwright itself does not write."""
    area = {"clip": {**clip, "scale": 1}} if clip else {}
    session = page.context.new_cdp_session(page)
    taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": 85, **area})
    path.write_bytes(base64.b64decode(taken["data"]))


def take(browser: Browser, cluster, directory: Path) -> None:
    page = new_page(browser, cluster.url, "light", WIDE)
    page.get_by_label("text", exact=True).check()
    page.locator("#prompt").fill("Name three rivers of Europe.")
    page.wait_for_timeout(WARM_UP_MS / 2)
    cluster.processes[4].signal(signal.SIGKILL)
    page.wait_for_timeout(WARM_UP_MS / 2)
    page.locator("#max-tokens").fill("60")
    page.locator("#send").click()
    page.get_by_role("button", name="Pause").focus()
    expect(page.locator("#answer-waterfall table")).to_be_visible(timeout=20_000)
    save(page, directory / "dashboard.webp")
    narrow = new_page(browser, cluster.url, "dark", NARROW)
    narrow.wait_for_timeout(8_000)
    save(narrow, directory / "dashboard-narrow.webp")
    dark = new_page(browser, cluster.url, "dark", TALL)
    dark.get_by_label("the whole request").check()
    dark.locator(".request[role=option]").nth(5).click()
    requests = dark.locator(".panel.requests")
    requests.scroll_into_view_if_needed()
    save(dark, directory / "dashboard-requests.webp", requests.bounding_box())


def main() -> int:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        profile.write(PROFILE)
        profile.flush()
        flags = ("--engine", "simulated", "--sim-profile", profile.name)
        stopping = threading.Event()
        with running_cluster(*flags, prefills=2, decodes=3) as cluster, sync_playwright() as driver:
            clients = [
                threading.Thread(target=client, args=(cluster.url, number, stopping))
                for number in range(NUM_CLIENTS)
            ]
            for thread in clients:
                thread.start()
            try:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
                take(browser, cluster, directory)
                browser.close()
            finally:
                stopping.set()
                for thread in clients:
                    thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
