"""Precedence of command line, environment and config file."""

from argparse import SUPPRESS
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

from tandem.settings.flags import Flag, SettingInvalid, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.wire.errors import ConfigInvalid


def parser(environment=None, **options):
    made = Parser("tandem try", common=["--page-size"], environment=environment or {}, **options)
    made.add_argument("--page-size", "--block-size", type=int, default=16, help="tokens a page")
    made.add_argument("--router", action="append", default=[], help="URL of a router")
    made.add_argument("--prefill", action="append", nargs="+", default=[], help="nodes")
    made.add_argument("--fast", action="store_true", help="hurry")
    made.add_argument("--ports", action="append", type=int, default=[], help="ports")
    made.add_argument("--old-port", action="append", type=int, dest="ports", help=SUPPRESS)
    made.add_argument("--policy", choices=["a", "b"], default="a", help="how to choose")
    return made


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "page-size: 32\nrouter: [http://a, http://b]\nfast: true\n"),
        ("toml", 'page_size = 32\nrouter = ["http://a", "http://b"]\nfast = true\n'),
    ],
)
def test_environment_and_command_line_override_the_file(tmp_path, suffix, text):
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


def test_environment_sets_config_path_and_shell_words(tmp_path):
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
        (["--transfer-directory", "/kv"], {}, "", "--transfer-directory was removed: use"),
        (["--zzz"], {}, "", "there is no flag --zzz: see tandem try --help-all"),
        (["here"], {}, "", "unexpected argument 'here'"),
        (["--page-size", "x"], {}, "", "argument --page-size/--block-size: invalid int value: 'x'"),
        ([], {"TANDEM_PAGE_SIZE": "x"}, "", "error: TANDEM_PAGE_SIZE: invalid int value: 'x'"),
        ([], {}, "page-size: x", "flags.yaml: page-size: invalid int value: 'x'"),
        ([], {}, "block_size: x", "flags.yaml: block_size: invalid int value: 'x'"),
        ([], {"TANDEM_PORTS": "1 x"}, "", "error: TANDEM_PORTS: invalid int value: 'x'"),
        ([], {}, "ports: [1, x]", "flags.yaml: ports: invalid int value: 'x'"),
        ([], {}, "old-port: x", "flags.yaml: old-port: invalid int value: 'x'"),
        ([], {"TANDEM_POLICY": "c"}, "", "error: TANDEM_POLICY: invalid choice: 'c'"),
        (["--page-size", "x"], {"TANDEM_PAGE_SIZE": "3"}, "", "error: argument --page-size"),
        (["--ports", "x"], {}, "ports: [3]", "error: argument --ports: invalid int value: 'x'"),
        (["--policy", "c"], {"TANDEM_PAGE_SIZE": "3"}, "", "error: argument --policy: invalid"),
        ([], {"TANDEM_CONFIG": "/nowhere.yaml"}, "", "error: TANDEM_CONFIG /nowhere.yaml: "),
        ([], {"TANDEM_FAST": "maybe"}, "", "TANDEM_FAST is 'maybe': use 1 or 0"),
        ([], {}, "page-sise: 3", "there is no flag --page-sise: did you mean --page-size?"),
        ([], {}, "policy: c", "flags.yaml: policy: invalid choice: 'c'"),
        ([], {}, "fast: 3", "fast: use true or false"),
        ([], {}, "router: {a: b}", "router: use a value or a list"),
        ([], {}, "config: other.yaml", "there is no flag --config"),
        ([], {}, "- page-size", "write one flag a line, such as `page-size: 32`"),
        ([], {}, "a: [", "not YAML in line 1"),
        ([], {}, 'page-size: 3\nrouter: "s3cret\n', "not YAML in line"),
        ([], {"TANDEM_ROUTER": "it's"}, "", "TANDEM_ROUTER: No closing quotation"),
        (["--config", "/nowhere.yaml"], {}, "", "error: --config /nowhere.yaml: "),
    ],
)
def test_invalid_input_is_reported_in_one_line(tmp_path, capsys, argv, environment, text, sentence):
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


def test_empty_variable_is_unset(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("router: [http://a]\n")
    read = parser({"TANDEM_ROUTER": "", "TANDEM_PAGE_SIZE": ""}).parse_args(["--config", str(path)])
    assert (read.router, read.page_size) == (["http://a"], 16)


@pytest.mark.parametrize("url", ["tcp://10.96.0.7:8000", "udp://[fd00::7]:8000"])
def test_service_variables_of_kubernetes_set_no_flag(url):
    made = parser({"TANDEM_PORT": url, "TANDEM_LINK_PORT": url, "TANDEM_PORT_8000_TCP": url})
    made.add_argument("--port", type=int, default=7000, help="a port")
    made.add_argument("--link-port", type=int, default=7001, help="a port")
    read = made.parse_args([])
    assert (read.port, read.link_port) == (7000, 7001)
    assert parser({"TANDEM_PREFILL": url}).parse_args([]).prefill == [[url]]


def test_each_name_of_a_flag_has_a_variable():
    made = parser({"TANDEM_BLOCK_SIZE": "32"})
    assert made.parse_args([]).page_size == 32
    assert {"TANDEM_PAGE_SIZE", "TANDEM_BLOCK_SIZE"} <= made.variables()
    assert (
        parser({"TANDEM_BLOCK_SIZE": "32", "TANDEM_PAGE_SIZE": "64"}).parse_args([]).page_size == 64
    )


def test_last_config_file_wins(tmp_path):
    paths = [tmp_path / name for name in ("one.yaml", "two.yaml")]
    for number, path in enumerate(paths, 1):
        path.write_text(f"page-size: {number}\n")
    read = parser().parse_args([f"--config={paths[0]}", "--config", str(paths[1])])
    assert read.page_size == 2


def test_invalid_file_affects_neither_help_nor_commands_without_flags():
    environment = {"TANDEM_CONFIG": "/nowhere"}
    with pytest.raises(SystemExit, match="0"):
        parser(environment).parse_args(["--help"])
    Parser("tandem bare", environment=environment).parse_args([])


def test_help_shows_common_flags_and_help_all_shows_every_flag(capsys):
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
    with pytest.raises(SystemExit, match="0"):  # of a command that hides none, the same as --help
        Parser("tandem bare").parse_args(["--help-all"])


def test_settings_are_the_set_flags_in_the_form_of_a_file(tmp_path):
    made = parser({"TANDEM_ROUTER": "http://a http://b", "TANDEM_FAST": "0"})
    made.add_argument(
        "--no-cache", dest="is_cached", action="store_false", default=True, help="cache"
    )
    made.ignore(["--enable-x", "--enable-y"])
    argv = [
        "--block-size",
        "16",
        "--prefill",
        "a",
        "1",
        "--prefill",
        "b",
        "--enable-y",
        "3",
        "--no-cache",
    ]
    settings = made.settings(made.parse_args(argv))
    assert settings == {
        "page-size": 16,
        "router": ["http://a", "http://b"],
        "prefill": [["a", "1"], ["b"]],
        "fast": False,
        "no-cache": True,
        "enable-y": [],
    }
    path = tmp_path / "flags.yaml"
    path.write_text(yaml.safe_dump(settings))
    again = made.parse_args(["--config", str(path)])
    assert (again.page_size, again.fast, again.is_cached) == (16, False, False)
    assert made.settings(made.parse_args([])).keys() == {"router", "fast"}


# ── the source of an invalid value ───────────────────────────────────────────────────────────────


def checked(text):
    if text == "bad":
        raise ConfigInvalid("--name bad: use a good one", topic="docs/names.md")
    return text


class Link(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, Flag("--port", ge=0, le=65535, help="a port")] = 8998


class Config(msgspec.Struct, frozen=True, kw_only=True):
    names: Annotated[
        tuple[str, ...],
        Flag(
            "--name",
            help="names",
            parse=lambda names: tuple(map(checked, names)),
            aliases={"--title": str},
        ),
    ] = ()
    mode: Annotated[Literal["a", "b"], Flag("--mode", help="mode", aliases={"--b": "b"})] = "a"
    link: Link = Link()


@pytest.mark.parametrize(
    ("argv", "environment", "text", "message"),
    [
        ("--port 70000", {"TANDEM_PORT": "3"}, "port: 70001", "--port is 70000: use 0 to 65535"),
        ("", {"TANDEM_PORT": "70000"}, "port: 3", "TANDEM_PORT: --port is 70000: use 0 to 65535"),
        ("", {}, "port: 70000", "{path}: port: --port is 70000: use 0 to 65535"),
        ("--name bad", {"TANDEM_NAME": "good"}, "", "--name bad: use a good one"),
        ("", {"TANDEM_NAME": "good bad"}, "", "TANDEM_NAME: --name bad: use a good one"),
        ("", {}, "name: [good, bad]", "{path}: name: --name bad: use a good one"),
        ("--title good", {}, "name: bad\nport: -1", "{path}: port: --port is -1: use 0 to 65535"),
        ("", {}, "title: bad", "{path}: title: --name bad: use a good one"),
        ("", {}, "name: good\ntitle: bad", "{path}: name, title: --name bad: use a good one"),
        ("", {}, "b: true\nport: -1", "{path}: port: --port is -1: use 0 to 65535"),
    ],
)
def test_invalid_value_is_reported_with_its_source(tmp_path, argv, environment, text, message):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    made = Parser("tandem try", environment={**environment, "TANDEM_CONFIG": str(path)})
    add_flags(made, Config)
    with pytest.raises(SettingInvalid) as raised:
        read_flags(Config, made.parse_args(argv.split()))
    assert raised.value.message == str(raised.value) == message.format(path=path)
    if isinstance(raised.value, ConfigInvalid):
        assert raised.value.for_operators == f"{raised.value.message}\nMore: docs/names.md"
