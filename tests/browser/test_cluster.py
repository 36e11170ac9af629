"""The page of a real router over real nodes with simulated engines."""

import re
import signal

import pytest
from playwright.sync_api import expect

from tests.e2e.cluster import running_cluster

# 20 ms a token: an answer of LONG tokens takes minutes, and so is there for as long as a machine may take to look at it.
PROFILE = '{"prefill": {"base_ms": 5, "per_token_ms": 0.05}, "decode": {"base_ms": 20}}'
LONG = 7000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(PROFILE)
    flags = ("--engine", "simulated", "--sim-profile", str(profile))
    with running_cluster(*flags, prefills=1, decodes=2, router_flags=("--workers", "2")) as running:
        yield running


def ask(page, prompt: str, tokens: int) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#max-tokens").fill(str(tokens))
    page.keyboard.press("Control+Enter")


def test_playground_streams_stops_and_appears_in_the_cluster_view(opened, cluster):
    page = opened(cluster.url + "/")
    expect(page.locator(".node[data-state=up]")).to_have_count(3)
    expect(page.locator("#workers")).to_have_text("2 edge workers")
    page.get_by_label("text", exact=True).check()
    page.locator("#prompt").focus()
    ask(page, "Rivers of Europe: " * 20, LONG)
    answer = page.locator("#answer")
    expect(answer).to_have_text(re.compile(".{20}"))
    expect(page.locator("#answer-status")).to_contain_text("First token after")
    early = len(answer.text_content())
    # While it runs it holds pages, and its pair is a line.
    expect(page.locator("#decodes .node", has_text="1 running")).to_have_count(1)
    expect(page.locator("#lines .is-busy")).to_have_count(1)
    held = page.locator("#decodes .node", has_text="1 running").locator(".page-held")
    assert held.evaluate("bar => Number(bar.style.flexGrow)") > 0
    expect(answer).to_have_text(re.compile(f".{{{early + 1}}}", re.DOTALL))
    page.locator("#stop").click()
    expect(page.locator("#answer-status")).to_contain_text("Stopped.")
    expect(page.locator("#decodes .node", has_text="1 running")).to_have_count(0)
    page.locator("#prompt").focus()
    ask(page, "Rivers of Europe:", 8)
    expect(page.locator("#answer-status")).to_contain_text("8 tokens,")


def test_playground_shows_the_error_of_the_router(opened, cluster):
    page = opened(cluster.url + "/")
    expect(page.locator(".node[data-state=up]")).to_have_count(3)
    page.get_by_label("text", exact=True).check()
    page.locator("#prompt").focus()
    ask(page, "word " * 20_000, 8)
    expect(page.locator("#answer-status")).to_have_text(re.compile("It failed: .*tokens"))


def test_request_waterfall_is_in_the_response_and_in_the_overview(opened, cluster):
    page = opened(cluster.url + "/")
    expect(page.locator(".node[data-state=up]")).to_have_count(3)
    page.get_by_label("text", exact=True).check()
    page.locator("#prompt").focus()
    ask(page, "Mountains of Europe:", 8)
    own = page.locator("#answer-waterfall")
    expect(own).to_contain_text("the time to first token.")
    name = own.locator(".facts b").first.text_content()
    row = page.locator(".request[role=option]", has_text=name)
    expect(row).to_have_count(1)
    row.click()
    detail = page.locator("#request-detail")
    expect(detail).to_contain_text("the time to first token.")
    expect(detail.locator("tbody")).to_contain_text("push")


def test_killed_node_is_shown_as_down(opened, cluster):
    page = opened(cluster.url + "/")
    expect(page.locator(".node[data-state=up]")).to_have_count(3)
    cluster.processes[1].signal(signal.SIGKILL)
    url = cluster.decode_urls[0]
    node = page.locator(f'.node[data-key="{url}"]')
    expect(node).to_have_attribute("data-state", "down")
