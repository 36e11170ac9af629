"""`tandem profile` of a tiny model, as people run it."""

import pytest

from tandem.engine.profile import NodeFigures, Profile, read_profile
from tandem.plan.nodes import node_kind
from tandem.profile.command import parse, write
from tandem.wire.errors import ConfigInvalid
from tests import fork_server


def profile(*flags):
    return fork_server.run(["tandem", "profile", *map(str, flags)])


@pytest.mark.thorough
def test_a_node_is_measured_and_its_profile_is_one_for_plans_and_simulated_engines(
    tiny_model, tmp_path
):
    file = tmp_path / "tiny.json"
    # Not the attention kernel that is compiled at each start.
    flags = (
        "--attention-backend torch --max-total-tokens 1024 --max-running-requests 8 --num-threads 1"
    )
    flags += " --chunked-prefill-size 32 --quick"
    done = profile("--model", tiny_model("llama"), *flags.split(), "-o", file)
    assert done.returncode == 0, done.stderr
    assert "ms  8 answers, after" in done.stdout
    found = read_profile(file)
    assert found.origin in done.stdout
    assert found.decode.forward_s(8, 800) > 0
    assert found.prefill.forward_s(32, 64) > 0
    assert (found.node.num_tokens, found.node.max_running_requests) == (1024, 8)
    # layers, heads, width, float32, K and V
    assert found.node.kv_bytes_per_token == 3 * 2 * 16 * 4 * 2
    assert not found.node.is_overlapped
    assert node_kind(str(file), "", cost=None, link_bytes_per_s=1e9).name == "tiny"


def test_a_profile_that_does_not_describe_what_was_measured_is_warned_of(tmp_path, capsys):
    path = tmp_path / "profile.json"
    figures = NodeFigures(num_tokens=1, kv_bytes_per_token=1, prefill_error=0.05, decode_error=0.25)
    write(Profile(node=figures), path)
    assert "25% off on average over the points of decode" in capsys.readouterr().err
    assert read_profile(path).node == figures


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--disable-prefix-cache"], "through the prefix cache"),
        (["--page-size", "0"], "--page-size/--block-size is 0"),
        (["--device", "cuda:1", "--tp", "2"], "is one device and --tp 2 takes more"),
        (["-o", "/nowhere/profile.json"], "/nowhere/profile.json: No such file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(flags, message):
    with pytest.raises(ConfigInvalid) as raised:
        parse(flags)
    assert message in raised.value.message
