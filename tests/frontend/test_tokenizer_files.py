import json
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tandem.frontend.text.tokenizer import Tokenizer, tokenizer_hash
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.wire.errors import ConfigInvalid
from tests.frontend.tokenizer_layouts import LAYOUTS, wordlevel

TEXTS = [
    "",
    "The capital of France is Paris.",
    "  two spaces, doesn't  it ? It's . n ' t !\n\n\tend ",
    "def f(x):\n    return x ** 12345",
    "Über ça 日本語と한국어 👩‍👩‍👧 🇫🇷 ﷽ e\u0301 \x00\x04y",
    "<s>a</s> b</s>\n<|im_start|>user <|eot_id|> x<|endoftext|>assistants assistant <tool> [INST] <unk>",
]
CHAT = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": " Paris</s>"},
    {"role": "user", "content": "Über\n"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
# transformers is the oracle, as users run it: with torch.
ORACLE = """
import random
from transformers import AutoTokenizer

def result(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer.encode(text) for text in job["texts"]]
    every = list(range(len(tokenizer))) * 2
    random.Random(1).shuffle(every)
    ids += [every[:3000], *(every[n : n + 5] for n in range(0, 200, 5))]
    chats = [
        tokenizer.apply_chat_template(job["chat"], tools=tools, add_generation_prompt=True)["input_ids"]
        for tools in (None, job["tools"])
    ]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in job["texts"]]
    texts = [[tokenizer.decode(one, skip_special_tokens=skip) for one in ids] for skip in (True, False)]
    return {"ids": ids, "plain": plain, "chats": chats, "texts": texts}
"""
# What the process that `tokenizer_files` starts does, without torch.
COMBINE = """
from pathlib import Path
sys.modules["torch"] = None
from tandem.frontend.text.tokenizer_files import combine

def result(directory):
    return combine(Path(directory), trusts_code=False)
"""
# One process for all directories, because importing transformers takes seconds.
EACH = """
def outcome(directory):
    try:
        return result(directory)
    except Exception as error:
        return {"error": repr(error)}

print(json.dumps([outcome(each) for each in job["directories"]]))
"""


def run(code: str, job: object) -> list[dict]:
    code = f"import json, sys\njob = json.load(sys.stdin)\n{code}\n{EACH}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tokenizer_dir):
    """The files of each layout, and the ids and texts of transformers."""
    made = {base: base() for base in {layout.base for layout in LAYOUTS.values()}}
    directories = {"smollm2": tokenizer_dir}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        directories[name] = tmp_path_factory.mktemp(f"layout{number}")
        layout.write(directories[name], made[layout.base])
    job = {"texts": TEXTS, "chat": CHAT, "tools": TOOLS}
    job["directories"] = [str(each) for each in directories.values()]
    with ThreadPoolExecutor() as both:
        outcomes = zip(*both.map(lambda code: run(code, job), (COMBINE, ORACLE)), strict=True)
    return dict(zip(directories, outcomes, strict=True))


@pytest.mark.parametrize("name", ["smollm2", *LAYOUTS])
def test_prompts_and_chats_have_the_ids_of_transformers(loaded, name):
    files, expected = loaded[name]
    assert "error" not in files | expected, expected
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode_batch(TEXTS) == expected["ids"][: len(TEXTS)]
    assert [tokenizer.encode(text) for text in TEXTS] == expected["ids"][: len(TEXTS)]
    assert [tokenizer.encode(text, False) for text in TEXTS] == expected["plain"]
    chats = [tokenizer.render_chat(CHAT, tools) for tools in (None, TOOLS)]
    assert [tokenizer.encode(chat, False) for chat in chats] == expected["chats"]


@pytest.mark.parametrize("name", ["smollm2", *LAYOUTS])
def test_whole_and_streamed_texts_are_those_of_transformers(loaded, name):
    files, expected = loaded[name]
    assert "error" not in files | expected, expected
    tokenizer = Tokenizer.from_files(files)
    rng = random.Random(name)
    for skip, texts in zip((True, False), expected["texts"], strict=True):
        for ids, text in zip(expected["ids"], texts, strict=True):
            assert tokenizer.decode(ids, skip) == text
            detokenizer, left, parts = tokenizer.detokenizer(skip), list(ids), []
            while left:
                size = rng.choice((1, 1, 1, 4))
                parts.append(detokenizer.push(left[:size]))
                left = left[size:]
            assert "".join(parts) + detokenizer.finish() == text


@pytest.fixture(scope="module")
def combined(tmp_path_factory):
    """A directory with a model and the cache of its tokenizer, and the tokenizer's files."""
    directory = tmp_path_factory.mktemp("combined")
    (directory / "model").mkdir()
    LAYOUTS["words"].write(directory / "model", wordlevel())
    return directory, tokenizer_files(directory / "model", cache=directory / "cache")


@pytest.fixture
def cached(combined, tmp_path):
    """A model, the cache of its tokenizer, and the tokenizer's files; a test may change the directories."""
    directory, files = combined
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model", tmp_path / "cache", files


def test_cached_tokenizer_is_combined_again_only_after_a_file_has_changed(cached, monkeypatch):
    model, cache, files = cached
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent")
        assert tokenizer_files(model, cache=cache) == files
        (model / "chat_template.jinja").write_text("{{ messages }}")
        with pytest.raises(FileNotFoundError):
            tokenizer_files(model, cache=cache)
    assert tokenizer_files(model, cache=cache) != files


@pytest.mark.parametrize("fault", ["unwritable", "damaged"])
def test_unusable_cache_does_not_keep_a_tokenizer_from_being_read(cached, fault):
    model, cache, files = cached
    if fault == "unwritable":
        shutil.rmtree(cache)
        cache.write_text("a file, not a directory")
    else:
        (written,) = cache.glob("*.json")
        written.write_bytes(b"{")
    assert tokenizer_files(model, cache=cache) == files


def test_result_of_trusted_code_is_not_cached(tmp_path):
    LAYOUTS["words"].write(tmp_path, wordlevel())
    tokenizer_files(tmp_path, trusts_code=True, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_directory_without_tokenizer_json_has_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == {}
    assert tokenizer_hash({}) == ""


def test_git_lfs_pointer_error_names_the_command(tmp_path):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(
        ConfigInvalid, match=r"tokenizer\.json is a Git LFS pointer.*run `git lfs pull`"
    ):
        tokenizer_files(tmp_path)


REFUSED = {
    "tokenizer.json is broken: Model missing": {"tokenizer.json": "{}"},
    "JSONDecodeError: Expecting property name": {"tokenizer_config.json": "{"},
    "TypeError: Special token bos_token has to be": {
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}}
    },
    "set --trust-remote-code": {
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    },
    "ByT5Tokenizer has no fast version": {
        "tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"}
    },
}


def test_tokenizer_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tandem.frontend.text.tokenizer_files import main\n"
        "for each in sys.argv[1:]: assert main(each) == 1"
    )
    paths = [tmp_path / str(number) for number in range(len(REFUSED))]
    for path, files in zip(paths, REFUSED.values(), strict=True):
        replace(LAYOUTS["words"], files=files).write(path, wordlevel())
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "cannot be loaded" in line]
    for path, reason, line in zip(paths, REFUSED, lines, strict=True):
        assert line.startswith(f"the tokenizer in {path} cannot be loaded: ")
        assert reason in line


def test_reason_of_the_process_is_raised(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigInvalid, match=r"tokenizer\.json is broken: Model missing"):
        tokenizer_files(tmp_path)


def test_reading_without_transformers_names_the_extra():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tandem.frontend.text.tokenizer_files import main; sys.exit(main('somewhere'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs transformers: pip install 'tandem-serve[parsers]'" in done.stderr
