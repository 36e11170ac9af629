"""The page in a browser, before an `/overview` that a test made up."""

import re

import msgspec
import pytest
from playwright.sync_api import Page, expect

from tandem.wire.messages import NodeLoad, TierLoad
from tests.browser import scenes
from tests.browser.stage import Stage

HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>\"'&"
# What a wide and a narrow screen show alike.
NARROW = {"width": 400, "height": 800}


def percent(style: str, name: str) -> float:
    found = re.search(rf"{name}: ([\d.]+)%", style)
    assert found, style
    return float(found[1])


def shown_nodes(page: Page) -> list[str]:
    return page.locator(".node .id").all_text_contents()


def test_page_shows_nodes_pairs_and_numbers(opened):
    overview = scenes.cluster(2, 3)
    with Stage(overview).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".node")).to_have_count(5)
        assert shown_nodes(page) == [node.id for node in overview.nodes]
        expect(page.locator("#lines g.is-busy")).to_have_count(len(overview.pairs))
        numbers = page.locator("#numbers")
        for fact in ("7.3", "42", "1,932", "p99", "4,210 finished"):
            expect(numbers).to_contain_text(fact)
        expect(page.locator("#health")).to_have_text("5 nodes serve")
        # A line begins at its prefill and ends at its decode.
        path = page.locator("#lines .band").first.get_attribute("d")
        assert re.fullmatch(r"M[\d.]+,[\d.]+ C[\d., ]+", path)


def test_line_width_follows_the_token_rate_of_a_pair(opened):
    overview = scenes.cluster(1, 2)
    slow, fast = overview.pairs[0], overview.pairs[1]
    pairs = [
        msgspec.structs.replace(slow, prompt_tokens_per_s=1e6),
        msgspec.structs.replace(fast, prompt_tokens_per_s=4e8),
    ]
    with Stage(msgspec.structs.replace(overview, pairs=pairs)).open() as stage:
        page = opened(stage.url)

        def width(pair) -> float:
            key = f"{pair.prefill} {pair.decode}"
            return page.locator(f'#lines g[data-key="{key}"] .band').evaluate(
                "line => parseFloat(line.style.strokeWidth)"
            )

        expect(page.locator("#lines g")).to_have_count(2)
        assert width(fast) == 9
        assert 1 < width(slow) < 2.5


def test_page_bars_follow_load_and_details_show_all_values(opened):
    with Stage(scenes.cluster(1, 1)).open() as stage:
        page = opened(stage.url)
        node = page.locator("#decodes .node")
        bar = node.locator(".page-held")
        expect(node).to_have_attribute("aria-label", re.compile("311 held, 64 granted"))
        before = bar.evaluate("bar => Number(bar.style.flexGrow)")
        load = msgspec.structs.replace(stage.shown.nodes[1].load, pages_held=2048, pages_free=0)
        nodes = [stage.shown.nodes[0], msgspec.structs.replace(stage.shown.nodes[1], load=load)]
        stage.shown = msgspec.structs.replace(stage.shown, nodes=nodes)
        expect(node).to_have_attribute("aria-label", re.compile("2048 held"))
        assert bar.evaluate("bar => Number(bar.style.flexGrow)") == 0.5 > before
        node.click()
        expect(page.locator("#node-detail")).to_contain_text("2,048 of 4,096")
        node.click()
        expect(page.locator("#node-detail")).to_be_hidden()


def test_tiers_show_fill_level_hit_rate_and_errors(opened):
    with Stage(scenes.tiered(2, 1)).open() as stage:
        page = opened(stage.url)
        troubled, well = page.locator("#prefills .node").all()
        expect(well.locator(".tier")).to_have_text(["host13 % hits", "redis4 % hits"])
        assert well.locator(".gauge i").first.evaluate("bar => bar.style.width") == "50%"
        # A store without a limit of its own has no gauge.
        expect(well.locator(".gauge").nth(1)).to_be_hidden()
        expect(well).to_have_attribute(
            "aria-label",
            re.compile("tier host up, 50 % full, 13 % of prompt tokens, tier redis up"),
        )
        expect(well).to_have_attribute("data-tiers", "")
        expect(troubled.locator(".tier").nth(1)).to_have_text("redisbacking off")
        expect(troubled).to_have_attribute("data-tiers", "troubled")
        expect(page.locator("#decodes .tiers")).to_be_hidden()
        troubled.click()
        detail = page.locator("#node-detail")
        for name, value in {
            "host": "up",
            "host holds": "4.29 GB of 8.59 GB",
            "host hits": "11.3k tokens, 13 %",
            "host misses": "40.0k tokens, 512 late",
            "host cost per token": "4 % of computing it",
            "host moved": "9.66 GB in, 3.22 GB out",
            "host evicted": "77",
            "redis": "backing off, shared",
            "redis holds": "193 GB",
            "redis cost per token": "not measured yet",
            "redis errors": "3 failed, 0 corrupted",
        }.items():
            fact = detail.locator(".fact").filter(has=page.get_by_text(name, exact=True))
            expect(fact.locator("b")).to_have_text(value)
        stage.shown = scenes.cluster(2, 1)  # both began anew without tiers
        expect(page.locator("#prefills .tier")).to_have_count(0)
        expect(detail).not_to_contain_text("host")


def test_request_details_show_where_tokens_were_cached(opened):
    split = scenes.timings(
        "split", num_cached_tokens=512, cached_by_tier={"host": 128, "redis": 256}
    )
    fetched = scenes.timings(
        "fetched", num_cached_tokens=256, cached_by_tier={"redis": 256, "host": 0}
    )
    plain = scenes.timings("plain", num_cached_tokens=256)
    with Stage(scenes.cluster(1, 1, recent=[split, fetched, plain])).open() as stage:
        page = opened(stage.url)
        for name, told in (
            ("split", "cached 512: device 128, host 128, redis 256"),
            ("fetched", "cached 256: redis 256"),
            ("plain", "cached 256"),
        ):
            row = page.locator(".request[role=option]", has_text=name)
            expect(row.locator(".tokens")).to_have_attribute("title", told)
            row.click()
            fact = page.locator("#request-detail .facts > span", has_text="cached")
            expect(fact).to_have_text(told)


def test_request_waterfall_phases_add_up(opened):
    with Stage(scenes.cluster(1, 1, recent=[scenes.timings()])).open() as stage:
        page = opened(stage.url)
        row = page.locator(".request[role=option]")
        expect(row).to_have_count(1)
        expect(row.locator(".track .swatch")).to_have_count(8)
        parts = [part.get_attribute("style") for part in row.locator(".track .swatch").all()]
        end = 0.0
        for style in parts:  # one begins where the one before ended, and the last ends at the end
            assert percent(style, "left") == pytest.approx(end, abs=0.01)
            end = percent(style, "left") + percent(style, "width")
        assert end == pytest.approx(100, abs=0.01)
        row.click()
        detail = page.locator("#request-detail")
        expect(detail).to_contain_text("8 phases before the first token, together 200 ms")
        expect(detail).to_contain_text("the time to first token.")
        expect(detail.locator("tbody tr")).to_have_count(14)
        expect(detail.locator("tr", has_text="prefill queue")).to_contain_text("35.0 ms")
        page.get_by_label("the whole request").check()
        expect(row.locator(".track .swatch")).to_have_count(9)


def test_page_does_not_claim_that_incomplete_phases_add_up(opened):
    with Stage(scenes.cluster(1, 1, recent=[scenes.timings(ttft_s=0.5)])).open() as stage:
        page = opened(stage.url)
        page.locator(".request[role=option]").click()
        expect(page.locator("#request-detail")).to_contain_text("the first token came after 500 ms")


def test_new_requests_appear_and_old_ones_stay(opened):
    first = [scenes.timings("first", scenes.NOW)]
    with Stage(scenes.cluster(1, 1, recent=first)).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".rid")).to_have_text(["first"])
        stage.shown = scenes.cluster(
            1,
            1,
            now_unix_s=scenes.NOW + 60,
            recent=[scenes.timings("second", scenes.NOW + 59)],
        )
        expect(page.locator(".rid")).to_have_text(["second", "first"])


def test_running_requests_come_first_and_stay_selected_when_they_end(opened):
    old, running = scenes.timings("old"), scenes.running("new")
    with Stage(scenes.cluster(1, 1, live=[running], recent=[old])).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".rid")).to_have_text(["new", "old"])
        row = page.locator(".request[role=option]").first
        expect(row).to_contain_text("running")
        row.click()
        expect(page.locator("#request-detail")).to_contain_text("unanswered")
        ended = scenes.timings("new", started_unix_s=running["started_unix_s"])
        stage.shown = scenes.cluster(1, 1, recent=[old, ended])
        expect(page.locator("#request-detail")).to_contain_text("finished")
        expect(page.locator(".rid")).to_have_text(["new", "old"])


def test_untrusted_text_is_not_interpreted_as_html(opened):
    overview = scenes.overview(
        [
            scenes.node(
                "prefill",
                1,
                id=HOSTILE,
                url=f"http://{HOSTILE}",
                zone=HOSTILE,
                load=NodeLoad(tiers=[TierLoad(name=HOSTILE, state=HOSTILE)]),
            ),
            scenes.node("decode", 1, id=HOSTILE, state="down", reason=HOSTILE),
        ],
        detail=HOSTILE,
        model=HOSTILE,
        recent=[
            scenes.timings(
                HOSTILE,
                outcome=HOSTILE,
                phases=[{"name": HOSTILE, "start_s": 0.0, "duration_s": 0.2, "node": HOSTILE}],
            )
        ],
    )
    with Stage(overview).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".node .id")).to_have_text([HOSTILE, HOSTILE])
        expect(page.locator(".tier-name")).to_have_text([HOSTILE])
        page.locator("#prefills .node").click()
        page.locator(".request[role=option]").click()
        expect(page.locator("#node-detail")).to_contain_text(HOSTILE)
        expect(page.locator("#request-detail tbody")).to_contain_text(HOSTILE)
        assert page.evaluate("window.hit") is None
        assert page.locator("img").count() == 1
        assert page.locator("body script").count() == 0


def test_key_dialog_keeps_the_key_in_one_tab(opened):
    with Stage(scenes.cluster(1, 1), api_keys=("right",)).open() as stage:
        page = opened(stage.url)
        dialog = page.get_by_role("dialog", name="This router requires an API key")
        expect(dialog).to_be_visible()
        expect(page.locator("main")).not_to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("The router rejected this key.")
        page.keyboard.type("right")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator(".node")).to_have_count(2)
        page.reload()
        expect(page.locator(".node")).to_have_count(2)
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        other = opened(stage.url)
        expect(other.get_by_role("dialog")).to_be_visible()


def test_page_reports_a_lost_router_and_reconnects(opened):
    stage = Stage(scenes.cluster(1, 1))
    with stage.open():
        page = opened(stage.url)
        expect(page.locator(".node")).to_have_count(2)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("The router has not answered since")
    expect(page.locator(".node")).to_have_count(2)
    stage.shown = scenes.cluster(1, 2)
    with stage.open():
        expect(page.locator(".node")).to_have_count(3)
        expect(banner).to_be_hidden()


def test_router_without_nodes_shows_how_to_add_them(opened):
    with Stage(scenes.overview()).open() as stage:
        page = opened(stage.url)
        expect(page.locator("#no-nodes")).to_contain_text("Start `tandem prefill`")
        expect(page.locator("#no-requests")).to_be_visible()
        expect(page.locator("#numbers")).to_contain_text("TTFT\u2013")


def has_visible_focus(page: Page) -> bool:
    return page.evaluate(
        """() => {
          const at = document.activeElement;
          const seen = at.matches("input[type=radio]") ? at.nextElementSibling : at;
          return at !== document.body && parseFloat(getComputedStyle(seen).outlineWidth) >= 1;
        }"""
    )


def test_all_functions_work_with_the_keyboard(opened):
    recent = [scenes.timings(f"r-{n}", scenes.NOW - n) for n in range(4, 0, -1)]
    with Stage(scenes.cluster(2, 3, recent=recent)).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".node")).to_have_count(5)
        press, focused = page.keyboard.press, page.locator(":focus")
        reached = set()
        for _ in range(40):
            press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break  # past the end
            assert has_visible_focus(page), focused.evaluate("at => at.outerHTML")
            reached.add(focused.evaluate("at => at.id || at.name || at.className || at.href"))
        assert {
            *("pause", "theme", "help-open", "node", "scale"),
            *("request", "mode", "prompt", "temperature", "max-tokens", "send", "answer"),
        } <= reached
        press("n")
        expect(focused).to_have_attribute("data-key", "http://10.0.0.1:7000")
        press("ArrowDown")
        expect(focused).to_have_attribute("data-key", "http://10.0.0.2:7000")
        press("ArrowRight")
        expect(focused).to_have_attribute("data-key", "http://10.0.1.2:7001")
        press("Enter")
        expect(focused).to_have_attribute("aria-selected", "true")
        expect(page.locator("#node-detail")).to_contain_text("http://10.0.1.2:7001")
        press("Escape")
        expect(page.locator("#node-detail")).to_be_hidden()
        press("r")
        press("ArrowDown")
        press("Enter")
        expect(page.locator("#request-detail")).to_contain_text("r-2")
        press("End")
        press(" ")
        expect(page.locator("#request-detail")).to_contain_text("r-4")
        press("Escape")
        expect(page.locator("#request-detail")).to_be_hidden()
        press("?")
        help_ = page.get_by_role("dialog", name="Keys")
        expect(help_).to_contain_text("dark or light")
        press("Escape")
        expect(help_).to_be_hidden()
        press(".")
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
        press("p")
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("no . or t is taken for a key")
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")


def test_paused_page_resumes(opened):
    with Stage(scenes.cluster(1, 1)).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".node")).to_have_count(2)
        page.locator("#pause").click()
        stage.shown = scenes.cluster(1, 3)
        with page.expect_response("**/overview*"):
            pass
        with page.expect_response("**/overview*"):
            pass
        expect(page.locator(".node")).to_have_count(2)
        page.locator("#pause").click()
        expect(page.locator(".node")).to_have_count(4)


def ground(page: Page) -> int:
    """Return how light the page's ground is, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(re.findall(r"\d+", colour)[0])


def test_color_scheme_follows_the_system_until_one_is_chosen(opened):
    with Stage(scenes.cluster(1, 1)).open() as stage:
        assert ground(opened(stage.url, color_scheme="light")) > 200
        page = opened(stage.url, color_scheme="dark")
        assert ground(page) < 60
        page.locator("#theme").click()
        assert ground(page) > 200
        page.reload()
        assert ground(page) > 200
        page.keyboard.press("t")
        assert ground(page) < 60


def test_reduced_motion_disables_animations(opened):
    with Stage(scenes.cluster(1, 1)).open() as stage:
        for motion, expected in (("no-preference", "along"), ("reduce", "none")):
            page = opened(stage.url, reduced_motion=motion)
            dots = page.locator("#lines .is-busy .dots").first
            expect(dots).to_be_attached()
            assert dots.evaluate("dots => getComputedStyle(dots).animationName") == expected


@pytest.mark.parametrize(("prefills", "decodes"), [(2, 3), (32, 32)])
def test_narrow_screen_needs_no_horizontal_scrolling(opened, prefills, decodes):
    recent = [scenes.timings("a-request-with-a-very-long-name-" * 4)]
    overview = scenes.tiered(prefills, decodes, recent=recent)
    with Stage(overview).open() as stage:
        page = opened(stage.url, viewport=NARROW)
        expect(page.locator(".node")).to_have_count(prefills + decodes)
        page.locator(".request[role=option]").click()
        page.locator("#decodes .node").first.click()
        page.locator("#prefills .node").first.click()
        width = page.evaluate("document.scrollingElement.scrollWidth")
        assert width <= NARROW["width"]


def test_every_control_has_an_accessible_name(opened):
    with Stage(scenes.cluster(2, 2, recent=[scenes.timings()])).open() as stage:
        page = opened(stage.url)
        expect(page.locator(".node")).to_have_count(4)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, [role=option], [role=img], section, dialog")]
              .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
                || one.textContent.trim() || one.closest("label")?.textContent.trim()))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == []
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
