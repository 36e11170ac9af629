import pytest

from tandem.manual.pages import Manual, anchor_of, shipped

INDEX = "# Front\n\n[b](b.md) and [errors](reference/errors.md#one)\n"
PAGE = """\
# `tandem b`

intro

## One thing

```sh
# no heading
```

### Under it

deep

## Other

## Other

twice
"""


@pytest.fixture
def manual(tmp_path):
    (tmp_path / "reference").mkdir()
    (tmp_path / "index.md").write_text(INDEX)
    (tmp_path / "a.md").write_text("# A\n\n## Draining\n\nhow\n")
    (tmp_path / "b.md").write_text(PAGE)
    (tmp_path / "reference" / "errors.md").write_text("# Errors\n\n## out_of_pages\n\nfull\n")
    return Manual(tmp_path)


def test_pages_come_in_the_order_of_the_front_page_and_those_it_leaves_out_last(manual):
    assert list(manual.pages) == ["index", "b", "errors", "a"]
    assert manual.pages["b"].title == "tandem b"


@pytest.mark.parametrize(
    ("topic", "begins", "ends"),
    [
        ("b", "# `tandem b`", "twice\n"),
        ("B", "# `tandem b`", "twice\n"),
        ("b.md", "# `tandem b`", "twice\n"),
        ("reference/errors", "# Errors", "full\n"),
        ("b#one-thing", "## One thing", "deep\n\n"),
        ("b#under-it", "### Under it", "deep\n\n"),
        ("b#other_1", "## Other", "twice\n"),
        ("errors#out_of_pages", "## out_of_pages", "full\n"),
        ("out_of_pages", "## out_of_pages", "full\n"),
        ("draining", "## Draining", "how\n"),
    ],
)
def test_a_topic_is_a_page_a_section_of_it_or_the_name_of_a_section(manual, topic, begins, ends):
    text = manual.find(topic)
    assert text is not None
    assert text.startswith(begins)
    assert text.endswith(ends)


@pytest.mark.parametrize(
    "topic", ["", "nowhere", "b#nowhere", "nowhere#other", "#other", "b#no-heading"]
)
def test_what_is_no_topic_is_none(manual, topic):
    assert manual.find(topic) is None


def test_a_name_that_several_pages_have_is_none_of_them_and_all_are_suggested(manual, tmp_path):
    (tmp_path / "c.md").write_text("# C\n\n## Draining\n")
    several = Manual(tmp_path)
    assert several.find("draining") is None
    assert several.suggest("draining") == ["a#draining", "c#draining"]


@pytest.mark.parametrize(
    ("topic", "first"),
    [("out_of_page", "errors#out_of_pages"), ("drainign", "a#draining"), ("erors", "errors")],
)
def test_what_is_nearly_a_topic_is_suggested(manual, topic, first):
    assert manual.suggest(topic)[0] == first


def test_headings_have_the_names_that_the_site_gives_them():
    assert anchor_of("What `x` does: a, b (and _c_)") == "what-x-does-a-b-and-_c_"
    assert anchor_of("Prefill's end") == "prefills-end"
    assert anchor_of("[A link](b.md) - two  spaces") == "a-link-two-spaces"


def test_the_manual_that_is_shipped_is_that_of_the_repository():
    manual = shipped()
    assert list(manual.pages)[:2] == ["index", "quickstart"]
    assert manual.find("errors#layout_mismatch")


def test_marks_of_tabs_are_for_the_site_alone():
    text = shipped().find("quickstart")
    assert "## One GPU box" in text
    assert "///" not in text
