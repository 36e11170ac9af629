"""`tandem profile` of a tiny model, as people run it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tandem.engine.profile import read_profile
from tandem.engine.shape import ModelShape
from tandem.plan.kinds import kind_of, read_profile_of
from tandem.profile.command import write
from tandem.profile.fitting import fit_decode, fit_prefill
from tandem.profile.flags import parse
from tandem.profile.grid import DecodePoint, PrefillPoint
from tandem.profile.report import Measured
from tandem.wire.errors import ConfigInvalid


def profile(*flags):
    command = [sys.executable, "-P", "-m", "tandem", "profile", *map(str, flags)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_node_is_measured_and_its_profile_is_one_for_plans_and_simulated_engines(
    tiny_model, tmp_path
):
    file = tmp_path / "tiny.json"
    # Not the kernel that is compiled at each start.
    small = (
        "--attention-backend",
        "torch",
        "--max-total-tokens",
        1024,
        "--max-running-requests",
        8,
        "--chunked-prefill-size",
        32,
    )
    # What this machine does beside it must not decide whether the fit is good.
    done = profile(
        "--model",
        tiny_model("llama"),
        *small,
        "--quick",
        "--num-threads",
        1,
        "--max-error",
        1e9,
        "-o",
        file,
    )
    assert done.returncode == 0, done.stderr
    assert "decode, 8 answers" in done.stdout
    assert "off by" in done.stdout
    found = read_profile(file)
    assert found.decode.forward_s(8, 800) > 0
    assert found.prefill.forward_s(32, 64) > 0
    assert (found.node.num_tokens, found.node.max_running_requests) == (1024, 8)
    assert (
        found.node.kv_bytes_per_token == 3 * 2 * 16 * 4 * 2
    )  # layers, heads, width, float32, K and V
    assert not found.node.is_overlapped
    assert "Measured by tandem profile" in found.origin
    kind = kind_of(str(file), read_profile_of(str(file), None), cost=None, link_bytes_per_s=1e9)
    assert kind.name == "tiny"


def test_a_profile_that_does_not_describe_what_was_measured_is_not_written(tmp_path, capsys):
    config = parse(["-o", str(tmp_path / "profile.json"), "--max-error", "0.1"])
    chunks = fit_prefill({PrefillPoint(n, 0): n / 1000 for n in (16, 32, 64)})
    steps = fit_decode({DecodePoint(n, 64): 1.0 + n % 2 for n in (1, 2, 3, 4, 5)})
    shape = ModelShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        context_length=1,
        eos_token_ids=frozenset(),
        dtype="float32",
        kv_dtype="float32",
        fingerprint="",
    )
    measured = Measured(config.node, shape, 1000, chunks, steps, [0.001], 0.0)
    assert write(config, measured) == 1
    assert (
        "off on average over the points of decode, above 10% (--max-error)"
        in capsys.readouterr().err
    )
    assert not config.output.exists()
    lenient = replace(config, max_error=0.9)
    assert write(lenient, measured) == 0
    assert read_profile(lenient.output).node.decode_error == pytest.approx(
        steps.mean_error, rel=0.001
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-error", "0"], "--max-error is 0"),
        (["--longest-context", "-1"], "--longest-context is -1"),
        (["--disable-prefix-cache"], "through the prefix cache"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--device", "cuda:1", "--tp", "2"], "is one device and --tp 2 takes more"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(flags, said):
    with pytest.raises(ConfigInvalid) as raised:
        parse(flags)
    assert said in raised.value.message


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured():
    done = profile("-o", "/nowhere/profile.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere/profile.json: No such file" in done.stderr
