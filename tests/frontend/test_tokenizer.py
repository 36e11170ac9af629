import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat_template import read_template
from tandem.frontend.tokenizer import Tokenizer, tokenizer_files, tokenizer_hash
from tandem.wire.errors import ConfigInvalid, InvalidRequest

TEXTS = [
    "The capital of France is",
    "  leading, trailing  \n\n\ttabs",
    "def f(x):\n    return x ** 2  # 数字\n",
    "日本語のテキストと한국어 텍스트",
    "👩‍👩‍👧‍👦 🇫🇷 ﷽ e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "x\x00\x04y",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Bonjour"},
    {"role": "assistant", "content": "Salut"},
    {"role": "user", "content": "ça va ?"},
]
# transformers is the oracle; it runs in a process of its own, for this one must not import torch.
ORACLE = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
job = json.load(sys.stdin)
ids = [tokenizer.encode(text) for text in job["texts"]]
print(json.dumps({
    "ids": ids,
    "texts": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
    "raw_texts": [tokenizer.decode(one) for one in ids],
    "chat": tokenizer.apply_chat_template(job["chat"], add_generation_prompt=True)["input_ids"],
}))
"""


@pytest.fixture(scope="module")
def oracle(tokenizer_dir):
    job = json.dumps({"texts": TEXTS, "chat": CHAT})
    done = subprocess.run(
        [sys.executable, "-c", ORACLE, tokenizer_dir],
        input=job,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(done.stdout)


def test_it_agrees_with_transformers(tokenizer, oracle):
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert ids == oracle["ids"]
    assert [tokenizer.decode(one) for one in ids] == oracle["texts"]
    assert [tokenizer.decode(one, skip_special_tokens=False) for one in ids] == oracle["raw_texts"]
    assert tokenizer.encode(tokenizer.render_chat(CHAT), False) == oracle["chat"]


@given(st.text(max_size=200) | st.text(alphabet="# \n=-", max_size=500))
def test_the_least_number_of_tokens_is_never_above_the_true_one(tokenizer, text):
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_the_least_number_of_tokens_of_a_huge_text_is_large(tokenizer):
    assert tokenizer.least_tokens("a" * 10_000_000) > 100_000


def with_config(tokenizer, **config):
    return Tokenizer.from_files(
        {
            "tokenizer.json": tokenizer.backend.to_str(),
            "tokenizer_config.json": json.dumps(config),
        }
    )


def test_add_bos_token_in_the_configuration_is_obeyed(tokenizer):
    changed = with_config(
        tokenizer, add_bos_token=True, bos_token={"content": "<|im_start|>", "lstrip": False}
    )
    assert changed.encode("hi") == [1, *tokenizer.encode("hi")]
    assert changed.encode("hi", add_special_tokens=False) == tokenizer.encode("hi")


def test_templates_may_be_a_list_of_named_ones(tokenizer):
    changed = with_config(
        tokenizer,
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ],
    )
    assert changed.render_chat(CHAT) == "plain"
    assert changed.render_chat(CHAT, tools=[{"type": "function"}]) == "1 tools"


def test_a_template_sees_what_transformers_gives_it(tokenizer):
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
def test_an_error_in_a_template_is_the_clients(tokenizer, template):
    with pytest.raises(InvalidRequest, match="chat template"):
        with_config(tokenizer, chat_template=template).render_chat(CHAT)


def test_a_model_without_template_says_what_to_use_instead(tokenizer):
    without = with_config(tokenizer)
    with pytest.raises(InvalidRequest, match=r"/v1/completions.*--chat-template FILE"):
        without.render_chat(CHAT)
    assert (tokenizer.has_chat_template, without.has_chat_template) == (True, False)


def test_a_given_template_replaces_the_models_own(tokenizer_dir):
    given = Tokenizer.load(tokenizer_dir, "{{ messages | length }} messages")
    assert given.render_chat(CHAT) == f"{len(CHAT)} messages"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "No such file"),
        (b"{% for %}{{ messages }}", "is not valid Jinja"),
        (b'{"name": "llama", "system": ""}', "give a Jinja template"),
        (b"", "give a Jinja template"),
        (b"\xff{{ messages }}", "utf-8"),
    ],
)
def test_a_file_that_is_no_template_is_refused_by_its_name(tmp_path, data, reason):
    if data is not None:
        (tmp_path / "chat.jinja").write_bytes(data)
    with pytest.raises(ConfigInvalid, match=f"--chat-template {tmp_path}/chat.jinja.*{reason}"):
        read_template(str(tmp_path / "chat.jinja"))


def test_the_hash_tells_apart_where_one_file_ends_and_the_next_begins():
    one = tokenizer_hash({"tokenizer.json": "ab", "tokenizer_config.json": "c"})
    other = tokenizer_hash({"tokenizer.json": "a", "tokenizer_config.json": "bc"})
    assert one != other


def test_a_directory_without_tokenizer_has_no_files_and_no_hash(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == {}
    assert tokenizer_hash({}) == ""


def test_a_pointer_of_git_lfs_is_refused_with_what_fetches_the_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(ConfigInvalid, match=r"tokenizer\.json: run `git lfs pull`"):
        tokenizer_files(tmp_path)


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
        {"tokenizer_config.json": '{"add_bos_token": true, "bos_token": "<no such token>"}'},
        {"chat_template.jinja": "{% for %}"},
    ],
)
def test_files_that_make_no_tokenizer_are_refused(tokenizer_dir, changes):
    files = tokenizer_files(tokenizer_dir)
    del files["chat_template.jinja"]  # which would overrule the others
    assert Tokenizer.from_files(files)
    files |= changes
    with pytest.raises(ConfigInvalid):
        Tokenizer.from_files(files)
