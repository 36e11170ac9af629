import pytest

from tandem.frontend.tokenizer import Tokenizer
from tandem.frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from tandem.wire.errors import ConfigInvalid


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
