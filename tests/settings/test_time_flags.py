"""The names of flags that take a time."""

import pytest

from tandem.cli.completion import parsers

UNITS = {"ms": ("MS",), "s": ("S", "SECONDS")}


@pytest.mark.parametrize("name", sorted(parsers()))
def test_time_flags_have_their_unit_in_name_and_placeholder(name):
    for action in parsers()[name]._actions:
        if action.help == "==SUPPRESS==" or not action.option_strings:
            continue
        flag, placeholder = action.option_strings[0], action.metavar
        unit = flag.rpartition("-")[2]
        field = action.dest.rpartition("_")[2]
        is_time = field in UNITS or placeholder in {*UNITS["s"], *UNITS["ms"]}
        is_time = is_time or (action.help or "").lower().startswith(
            ("time ", "interval ", "seconds ")
        )
        assert (unit in UNITS) == is_time, flag
        assert not is_time or placeholder in UNITS[unit], flag


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("prefill", "--grant-timeout", "transfer.grant_timeout_s"),
        ("drain", "--timeout", "timeout_s"),
    ],
)
def test_time_flags_without_unit_remain_as_aliases(name, old, new):
    url = ["http://127.0.0.1:7000"] if name == "drain" else []
    assert vars(parsers()[name].parse_args([*url, old, "3"]))[new] == 3.0
