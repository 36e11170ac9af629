import pytest

from tandem.engine.profile import DecodeTimes, Profile, Simulation
from tandem.frontend.options import HttpOptions
from tandem.node.flags import build_parser, read_config
from tandem.wire.errors import ConfigInvalid


def read(*argv: str, role="prefill"):
    parser = build_parser("tandem", role, "", 7000)
    return read_config(parser, role, argv)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-model-len", "99"], "context_length", 99),
        (["--context-length", "99"], "context_length", 99),
        (["--block-size", "32"], "page_size", 32),
        (["--max-num-seqs", "7"], "max_running_requests", 7),
        (["--gpu-memory-utilization", "0.5"], "mem_fraction_static", 0.5),
        (["--dtype", "half"], "dtype", "float16"),
        (["--disable-radix-cache"], "is_prefix_cache_enabled", False),
        (["--chunked-prefill-size", "64"], "chunked_prefill_size", 64),
        (["--tp", "2"], "tp_size", 2),
        (["--load-format", "dummy", "--random-seed", "4"], "random_seed", 4),
    ],
)
def test_familiar_flags_set_what_they_name(argv, field, value):
    config, _ = read(*argv)
    assert getattr(config.engine, field) == value


def test_the_flags_of_sglangs_disaggregation_are_understood():
    config, meaningless = read(
        *["--model-path", "/m", "--served-model-name", "n", "--disaggregation-mode", "prefill"],
        *["--disaggregation-transfer-backend", "tcp", "--disaggregation-bootstrap-port", "5"],
        *["--disaggregation-ib-device", "mlx5_0", "--enable-metrics", "--tp", "1"],
    )
    assert (config.transfer.backend, config.transfer.bootstrap_port) == ("tcp", 5)
    assert config.served_model_name == "n"
    assert meaningless == ["--disaggregation-ib-device", "--enable-metrics"]


def test_a_chat_template_is_read_with_the_flags(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    config, _ = read("--chat-template", str(tmp_path / "chat.jinja"))
    assert config.chat_template == "{{ messages }}"


def test_a_node_on_a_gpu_takes_transports_that_reach_its_memory():
    config, _ = read("--device", "cuda:0")
    assert config.engine.device == "cuda:0"
    read("--device", "cuda", "--tp", "2", "--transfer-backend", "cuda_ipc,nccl")
    with pytest.raises(ConfigInvalid, match="--transfer-backend tcp does not reach"):
        read("--device", "cuda:0", "--transfer-backend", "cuda_ipc,tcp")


def test_the_flags_of_a_link_reach_its_transport():
    config, _ = read("--transfer-backend", "file", "--transfer-directory", "/mnt/kv")
    assert (config.transfer.backend, config.transfer.directory) == ("file", "/mnt/kv")
    config, _ = read("--transfer-interface", "eth1", "--host", "0.0.0.0")
    assert config.transfer.interface == "eth1"


def test_a_simulation_takes_no_time_and_real_pages_unless_told_otherwise(tmp_path):
    assert read()[0].engine.simulation is None
    assert read("--engine", "simulated")[0].engine.simulation == Simulation()
    file = tmp_path / "profile.json"
    file.write_text('{"decode": {"base_ms": 12}}')
    flags = ["--engine", "simulated", "--sim-profile", str(file), "--sim-kv", "none"]
    profile = Profile(decode=DecodeTimes(base_ms=12))
    assert read(*flags)[0].engine.simulation == Simulation(profile=profile, kv="none")


def test_a_flag_that_takes_no_value_does_not_swallow_the_next_one():
    config, _ = read("--enforce-eager", "--port", "5")
    assert config.port == 5


@pytest.mark.parametrize(
    "argv",
    [
        ["--page-size", "0"],
        ["--chunked-prefill-size", "-1"],
        ["--port", "70000"],
        ["--mem-fraction-static", "1.5"],
        ["--max-running-requests", "0"],
        ["--transfer-interface", "eth1"],
        ["--transfer-backend", "file"],
        ["--transfer-backend", "tcp,file"],
        ["--device", "cuda:0", "--tp", "2"],
        ["--tp", "0"],
        ["--transfer-backend", "shm", "--device", "cuda:0"],
        ["--sim-kv", "none"],
        ["--sim-profile", "profile.json"],
        ["--engine", "simulated", "--tp", "2"],
        ["--engine", "simulated", "--device", "cuda:0"],
        ["--sim-profile", "/nowhere/profile.json", "--engine", "simulated"],
        ["--drain-timeout-s", "-1"],
        ["--drain-timeout-s", "nan"],
        ["--router", "10.0.0.7:8000"],
        ["--router", "http://10.0.0.7:x"],
        ["--advertise-url", "http://"],
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_flag(argv):
    with pytest.raises(ConfigInvalid, match=argv[0]):
        read(*argv)


def test_the_wrong_mode_for_a_role_is_an_error(capsys):
    with pytest.raises(SystemExit):
        read("--disaggregation-mode", "decode")
    assert "prefill node" in capsys.readouterr().err


def test_a_node_that_serves_alone_has_no_transfer_flags(capsys):
    with pytest.raises(SystemExit):
        read("--transfer-backend", "tcp", role="colocated")
    assert "there is no flag --transfer-backend" in capsys.readouterr().err


def test_a_node_takes_the_same_flags_of_http_as_a_router():
    flags = "--api-key a --api-key b --max-body-bytes 9 --request-timeout-s 3 --cors-allow-origin *"
    config, _ = read(*flags.split())
    assert config.http == HttpOptions(
        api_keys=("a", "b"), max_body_bytes=9, request_timeout_s=3.0, cors_origins=("*",)
    )


def test_formats_of_replies_are_told_of_before_the_model_is_loaded():
    config, _ = read("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "qwen3")
    with pytest.raises(ConfigInvalid, match="--reasoning-parser: 'x' is not known"):
        read("--reasoning-parser", "x")


def test_tiers_are_taken_in_the_order_in_which_they_are_given():
    config, _ = read(
        *("--kv-tier", "host:8GiB", "--kv-tier", "disk:/kv:1TiB"),
        *("--kv-tier-timeout-ms", "250", "--kv-tier-min-tokens", "64"),
    )
    assert config.tiers.specs == ("host:8GiB", "disk:/kv:1TiB")
    assert (config.tiers.timeout_s, config.tiers.min_tokens) == (0.25, 64)
    assert config.engine.has_tiers
    assert not read()[0].engine.has_tiers


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (["--hicache-size", "8", "--enable-hierarchical-cache"], "host:8GB"),
        (["--kv-offloading-size", "0.5"], "host:0.5GiB"),
    ],
)
def test_what_others_call_memory_of_the_host_is_the_first_tier(argv, first):
    config, _ = read(*argv, "--kv-tier", "disk:/kv:1TiB")
    assert config.tiers.specs == (first, "disk:/kv:1TiB")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-tier", "tape:8GiB"], "give host:SIZE"),
        (["--kv-tier", "host:much"], "is not a size"),
        (["--kv-tier", "host:8GiB", "--disable-prefix-cache"], "behind the prefix cache"),
        (
            ["--kv-tier", "host:8GiB", "--engine", "simulated", "--sim-kv", "none"],
            "give --sim-kv real",
        ),
        (["--kv-tier", "host:8GiB", "--kv-tier-timeout-ms", "0"], "at least 1"),
        (["--enable-hierarchical-cache"], "--kv-tier host:SIZE"),
    ],
)
def test_tiers_that_cannot_be_are_refused_with_what_to_give(argv, words):
    with pytest.raises(ConfigInvalid, match=words):
        read(*argv)
