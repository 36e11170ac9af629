import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.text.chat_template import read_template
from tandem.frontend.text.tokenizer import Tokenizer, tokenizer_hash
from tandem.wire.errors import ConfigInvalid, InvalidRequest

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Bonjour"},
    {"role": "assistant", "content": "Salut"},
    {"role": "user", "content": "ça va ?"},
]


@given(
    st.text(max_size=200) | st.text(alphabet="# \n=-", max_size=500),
    st.integers(1, 20),
    st.integers(0, 100),
)
def test_min_tokens_is_a_lower_bound(tokenizer, part, count, limit):
    text = part * count
    assert tokenizer.min_tokens(text, limit) <= len(tokenizer.encode(text))


def test_min_tokens_of_a_huge_text_is_large(tokenizer):
    assert tokenizer.min_tokens("a" * 10_000_000, 100_000) > 100_000


def test_long_text_is_refused_by_its_beginning(tokenizer):
    assert 1000 < tokenizer.min_tokens("so it goes, " * 10_000, 1000) < 3000


def with_config(tokenizer, **config):
    return Tokenizer.from_files(
        {
            "tokenizer.json": tokenizer.backend.to_str(),
            "tokenizer_config.json": json.dumps(config),
        }
    )


def test_templates_may_be_a_named_list(tokenizer):
    changed = with_config(
        tokenizer,
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ],
    )
    assert changed.render_chat(CHAT) == "plain"
    assert changed.render_chat(CHAT, tools=[{"type": "function"}]) == "1 tools"


def test_template_gets_the_variables_of_transformers(tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ flag }}"
        "{% generation %}made{% endgeneration %}"
    )
    changed = with_config(tokenizer, chat_template=template, bos_token="<s>")
    text = changed.render_chat([{"role": "user", "content": "<é>"}] * 2, extra={"flag": "!"})
    assert text == '<s>{"role": "user", "content": "<é>"}4!made'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_template_error_is_a_client_error(tokenizer, template):
    with pytest.raises(InvalidRequest, match="chat template"):
        with_config(tokenizer, chat_template=template).render_chat(CHAT)


def test_missing_template_error_names_alternatives(tokenizer):
    without = with_config(tokenizer)
    with pytest.raises(InvalidRequest, match=r"/v1/completions.*--chat-template FILE"):
        without.render_chat(CHAT)
    assert (tokenizer.has_chat_template, without.has_chat_template) == (True, False)


def test_chat_template_flag_replaces_the_models_template(tokenizer_dir):
    given = Tokenizer.load(tokenizer_dir, "{{ messages | length }} messages")
    assert given.render_chat(CHAT) == f"{len(CHAT)} messages"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "No such file"),
        (b"{% for %}{{ messages }}", "is not valid Jinja"),
        (b'{"name": "llama", "system": ""}', "use a Jinja template"),
        (b"", "use a Jinja template"),
        (b"\xff{{ messages }}", "utf-8"),
    ],
)
def test_invalid_template_file_is_rejected_by_name(tmp_path, data, reason):
    if data is not None:
        (tmp_path / "chat.jinja").write_bytes(data)
    with pytest.raises(ConfigInvalid, match=f"--chat-template {tmp_path}/chat.jinja.*{reason}"):
        read_template(str(tmp_path / "chat.jinja"))


def test_files_of_a_node_of_the_last_release_are_read(tokenizer):
    token = {"content": "<s>", "lstrip": False}
    changed = with_config(
        tokenizer, bos_token=token, add_bos_token=True, chat_template="{{ bos_token }}"
    )
    assert changed.render_chat(CHAT) == "<s>"


def test_tokenizer_hash_depends_on_file_boundaries():
    one = tokenizer_hash({"tokenizer.json": "ab", "tokenizer_config.json": "c"})
    other = tokenizer_hash({"tokenizer.json": "a", "tokenizer_config.json": "bc"})
    assert one != other


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "[]"},
        {"tokenizer.json": '{"version": "1.0", "model": {"type": "BPE"}}'},
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": "[]"},
        {"tokenizer_config.json": '{"chat_template": "{% if %}"}'},
        {"tokenizer_config.json": '{"chat_template": ["{{ messages }}"]}'},
        {"tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'},
        {"chat_template.jinja": "{% for %}"},
    ],
)
def test_invalid_tokenizer_files_are_rejected(tokenizer, changes):
    files = {"tokenizer.json": tokenizer.backend.to_str()} | changes
    with pytest.raises(ConfigInvalid):
        Tokenizer.from_files(files)
