"""Flags, over the environment, over a file."""

import pytest

from tandem.wire.command_line import Parser


def parser(environment=None, **options):
    made = Parser("tandem try", common=["--page-size"], environment=environment or {}, **options)
    made.add_argument("--page-size", "--block-size", type=int, default=16, help="tokens a page")
    made.add_argument("--router", action="append", default=[], help="URL of a router")
    made.add_argument("--prefill", action="append", nargs="+", default=[], help="nodes")
    made.add_argument("--fast", action="store_true", help="hurry")
    made.add_argument("--policy", choices=["a", "b"], default="a", help="how to choose")
    return made


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "page-size: 32\nrouter: [http://a, http://b]\nfast: true\n"),
        ("toml", 'page_size = 32\nrouter = ["http://a", "http://b"]\nfast = true\n'),
    ],
)
def test_a_file_gives_flags_that_the_environment_and_the_command_line_replace(
    tmp_path, suffix, text
):
    path = tmp_path / f"flags.{suffix}"
    path.write_text(text)
    argv = ["--config", str(path)]
    read = parser().parse_args(argv)
    assert (read.page_size, read.router, read.fast) == (32, ["http://a", "http://b"], True)
    environment = {"TANDEM_PAGE_SIZE": "64", "TANDEM_ROUTER": "http://c http://d"}
    read = parser(environment).parse_args(argv)
    assert (read.page_size, read.router) == (64, ["http://c", "http://d"])
    read = parser(environment).parse_args([*argv, "--block-size=128", "--router", "http://e"])
    assert (read.page_size, read.router) == (128, ["http://e"])
    assert parser({"TANDEM_FAST": "0"}).parse_args(argv).fast is False
    assert parser({"TANDEM_FAST": "0"}).parse_args([*argv, "--fast"]).fast is True
    assert parser().parse_args([*argv, "--no-fast"]).fast is False


def test_the_environment_names_the_file_and_words_as_a_shell_does(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("prefill: [[http://a, 8998], [http://b]]\n")
    read = parser({"TANDEM_CONFIG": str(path)}).parse_args([])
    assert read.prefill == [["http://a", "8998", "http://b"]]
    read = parser({"TANDEM_PREFILL": "http://a 8998"}).parse_args([])
    assert read.prefill == [["http://a", "8998"]]


@pytest.mark.parametrize(
    ("argv", "environment", "text", "sentence"),
    [
        (["--pagesize", "3"], {}, "", "there is no flag --pagesize: did you mean --page-size?"),
        (["--zzz"], {}, "", "there is no flag --zzz: see tandem try --help-all"),
        (["here"], {}, "", "unexpected argument 'here'"),
        (["--page-size", "x"], {}, "", "argument --page-size/--block-size: invalid int value: 'x'"),
        ([], {"TANDEM_PAGE_SIZE": "x"}, "", "invalid int value: 'x'"),
        ([], {"TANDEM_FAST": "maybe"}, "", "TANDEM_FAST is 'maybe': give 1 or 0"),
        ([], {}, "page-sise: 3", "there is no flag --page-sise: did you mean --page-size?"),
        ([], {}, "policy: c", "invalid choice: 'c'"),
        ([], {}, "fast: 3", "fast: give true or false"),
        ([], {}, "router: {a: b}", "router: give a value or a list"),
        ([], {}, "config: other.yaml", "there is no flag --config"),
        ([], {}, "- page-size", "write one flag a line, such as `page-size: 32`"),
        ([], {}, "a: [", "not YAML in line 1"),
        ([], {}, 'page-size: 3\nrouter: "s3cret\n', "not YAML in line"),
        ([], {"TANDEM_ROUTER": "it's"}, "", "TANDEM_ROUTER: No closing quotation"),
        (["--config", "/nowhere.yaml"], {}, "", "No such file"),
    ],
)
def test_what_is_wrong_is_answered_in_one_line(tmp_path, capsys, argv, environment, text, sentence):
    if text:
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        argv = [*argv, "--config", str(path)]
    with pytest.raises(SystemExit) as stopped:
        parser(environment).parse_args(argv)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem try: error: ")
    assert sentence in line
    assert "s3cret" not in line


def test_an_empty_variable_is_not_set(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("router: [http://a]\n")
    read = parser({"TANDEM_ROUTER": "", "TANDEM_PAGE_SIZE": ""}).parse_args(["--config", str(path)])
    assert (read.router, read.page_size) == (["http://a"], 16)


def test_the_last_file_counts_as_the_last_flag_does(tmp_path):
    paths = [tmp_path / name for name in ("one.yaml", "two.yaml")]
    for number, path in enumerate(paths, 1):
        path.write_text(f"page-size: {number}\n")
    read = parser().parse_args([f"--config={paths[0]}", "--config", str(paths[1])])
    assert read.page_size == 2


def test_a_wrong_file_keeps_neither_help_nor_commands_without_flags_from_working():
    environment = {"TANDEM_CONFIG": "/nowhere"}
    with pytest.raises(SystemExit, match="0"):
        parser(environment).parse_args(["--help"])
    Parser("tandem bare", environment=environment).parse_args([])


def test_help_shows_the_flags_that_matter_and_help_all_the_rest(capsys):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["--help"])
    assert stopped.value.code == 0
    short = capsys.readouterr().out
    assert "--page-size" in short
    assert "--router" not in short
    assert "more flags: tandem try --help-all" in short
    with pytest.raises(SystemExit):
        parser().parse_args(["--help-all"])
    assert "--router" in capsys.readouterr().out
