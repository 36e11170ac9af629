import pytest

from tandem.engine.profile import DecodeTimes, Profile, Simulation
from tandem.frontend.options import HttpOptions
from tandem.node.config import transports_of
from tandem.node.flags import build_parser, read_options
from tandem.settings.flags import SettingInvalid


def read(*argv: str, role="prefill"):
    parser = build_parser("tandem", role, "", 7000)
    return read_options(parser, role, argv)


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
def test_flags_of_sglang_and_vllm_set_their_fields(argv, field, value):
    config, _ = read(*argv)
    assert getattr(config.engine, field) == value


def test_first_served_name_is_that_of_answers():
    config, _ = read("--model-path", "/m/llama", "--served-model-name", "n", "alias")
    assert (config.served_model_name, config.served_model_names) == ("n", ("n", "alias"))
    config, _ = read("--model-path", "/m/llama", "--served-model-name", "")
    assert config.served_model_names == ("llama",)


def test_sglang_disaggregation_flags_are_accepted():
    config, meaningless = read(
        *["--model-path", "/m", "--served-model-name", "n", "--disaggregation-mode", "prefill"],
        *["--disaggregation-transfer-backend", "tcp", "--disaggregation-bootstrap-port", "5"],
        *["--enable-p2p-check", "--enable-metrics", "--tp", "1"],
    )
    assert (config.transfer.backend, config.transfer.bootstrap_port) == ("tcp", 5)
    assert config.served_model_names == ("n",)
    assert meaningless == ["--enable-p2p-check", "--enable-metrics"]


def test_timeouts_of_the_transfer_have_flags_with_bounds():
    config, _ = read("--early-grant-timeout-s", "2", "--landed-timeout-s", "0.5")
    assert (config.transfer.early_grant_timeout_s, config.transfer.landed_timeout_s) == (2.0, 0.5)
    for flag in ("--grant-timeout-s", "--early-grant-timeout-s", "--landed-timeout-s"):
        with pytest.raises(SettingInvalid, match=f"{flag}.* is 0: use 0.1 to 86400"):
            read(flag, "0")


def test_chat_template_is_read_with_the_flags(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    config, _ = read("--chat-template", str(tmp_path / "chat.jinja"))
    assert config.chat_template == "{{ messages }}"


def test_gpu_node_accepts_only_transports_that_reach_its_memory():
    config, _ = read("--device", "cuda:0")
    assert config.engine.device == "cuda:0"
    read("--device", "cuda", "--tp", "2", "--transfer-backend", "cuda_ipc,nccl")
    with pytest.raises(SettingInvalid, match="--transfer-backend tcp does not reach"):
        read("--device", "cuda:0", "--transfer-backend", "cuda_ipc,tcp")


def test_vllm_on_a_cpu_rejects_shm_and_defaults_to_tcp():
    with pytest.raises(SettingInvalid, match=r"--transfer-backend shm .*: use auto or tcp"):
        read("--engine", "vllm", "--transfer-backend", "shm")
    config, _ = read("--engine", "vllm")
    assert transports_of(config) == ["tcp"]


def test_transfer_interface_is_in_the_config():
    config, _ = read("--transfer-interface", "eth1", "--host", "0.0.0.0")
    assert config.transfer.interface == "eth1"


@pytest.mark.parametrize("flag", ["--transfer-device", "--disaggregation-ib-device"])
@pytest.mark.parametrize(
    ("names", "tp_size", "of_each_rank"),
    [
        ("", 2, [(), ()]),
        ("mlx5_0:1", 2, [("mlx5_0:1",), ("mlx5_0:1",)]),
        ("mlx5_0,mlx5_1", 2, [("mlx5_0",), ("mlx5_1",)]),
        ("mlx5_0,mlx5_1", 1, [("mlx5_0", "mlx5_1")]),
        ("a,b,c,d", 2, [("a", "b"), ("c", "d")]),
    ],
)
def test_rdma_devices_are_divided_among_the_ranks(flag, names, tp_size, of_each_rank):
    config, ignored = read(flag, names, "--tp", str(tp_size), "--transfer-backend", "nixl,tcp")
    ranks = [config.transfer.of_transports("::1", rank, tp_size) for rank in range(tp_size)]
    assert [each.devices for each in ranks] == of_each_rank
    assert ignored == []


@pytest.mark.parametrize(("port", "of_each_rank"), [("9100", [9100, 9101]), ("0", [0, 0])])
def test_ranks_use_consecutive_transfer_ports(port, of_each_rank):
    config, _ = read("--transfer-port", port, "--tp", "2")
    ranks = [config.transfer.of_transports("::1", rank, 2) for rank in range(2)]
    assert [each.port for each in ranks] == of_each_rank
    assert config.transfer.of_transports("::1", 1, 2, stage=2).port == (
        9105 if of_each_rank[0] else 0
    )


@pytest.mark.parametrize("names", ["a,b", "a,b,c,d"])
def test_rdma_devices_that_do_not_divide_among_the_ranks_are_rejected(names):
    with pytest.raises(SettingInvalid, match=r"--transfer-device names \d devices for 3 ranks"):
        read("--transfer-device", names, "--tp", "3")


def test_interface_without_tcp_is_rejected():
    argv = ("--host", "0.0.0.0", "--transfer-interface", "mlx5_0:1", "--transfer-backend")
    with pytest.raises(SettingInvalid, match="is of tcp; set --transfer-device for nixl, ucx"):
        read(*argv, "nixl,ucx")
    read(*argv, "nixl,tcp")


def test_silence_of_its_own_engine_is_a_pause_to_a_colocated_node_for_half_a_minute():
    (alone, _), (paired, _) = read(role="colocated"), read(role="decode")
    assert (alone.heartbeat.interval_s, paired.heartbeat.interval_s) == (0.5, 0.5)
    assert alone.heartbeat.timeout_s > 30 < alone.heartbeat.silence_s
    assert paired.heartbeat.silence_s < 2


def test_simulation_defaults_to_no_time_and_real_pages(tmp_path):
    assert read()[0].engine.simulation is None
    assert read("--engine", "simulated")[0].engine.simulation == Simulation()
    file = tmp_path / "profile.json"
    file.write_text('{"decode": {"base_ms": 12}}')
    flags = ["--engine", "simulated", "--sim-profile", str(file), "--sim-kv", "none"]
    profile = Profile(decode=DecodeTimes(base_ms=12))
    assert read(*flags)[0].engine.simulation == Simulation(profile=profile, kv="none")


def test_flag_without_value_does_not_consume_the_next_argument():
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
def test_invalid_value_is_rejected_by_flag_name(argv):
    with pytest.raises(SettingInvalid, match=argv[0]):
        read(*argv)


def test_wrong_disaggregation_mode_is_rejected(capsys):
    with pytest.raises(SystemExit):
        read("--disaggregation-mode", "decode")
    assert "prefill node" in capsys.readouterr().err


def test_removed_attention_backend_is_rejected_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        read("--attention-backend", "flashinfer")
    error = capsys.readouterr().err
    assert "--attention-backend: invalid choice: 'flashinfer'" in error
    assert all(name in error for name in ("auto", "torch", "cpu", "triton"))


def test_colocated_node_has_no_transfer_flags(capsys):
    with pytest.raises(SystemExit):
        read("--transfer-backend", "tcp", role="colocated")
    assert "there is no flag --transfer-backend" in capsys.readouterr().err


def test_node_accepts_the_http_flags_of_a_router():
    flags = "--api-key a --api-key b --max-body-bytes 9 --request-timeout-s 3 --cors-allow-origin *"
    config, _ = read(*flags.split())
    assert config.http == HttpOptions(
        api_keys=("a", "b"), max_body_bytes=9, request_timeout_s=3.0, cors_origins=("*",)
    )


def test_unknown_reply_parser_is_rejected_before_the_model_loads():
    config, _ = read("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "qwen3")
    with pytest.raises(SettingInvalid, match="--reasoning-parser: unknown parser 'x'"):
        read("--reasoning-parser", "x")


def test_tiers_keep_the_order_of_their_flags():
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
def test_host_memory_flags_of_others_set_the_first_tier(argv, first):
    config, _ = read(*argv, "--kv-tier", "disk:/kv:1TiB")
    assert config.tiers.specs == (first, "disk:/kv:1TiB")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-tier", "tape:8GiB"], "use host:SIZE"),
        (["--kv-tier", "host:much"], "is not a size"),
        (["--kv-tier", "host:8GiB", "--disable-prefix-cache"], "needs the prefix cache"),
        (
            ["--kv-tier", "host:8GiB", "--engine", "simulated", "--sim-kv", "none"],
            "use --sim-kv real",
        ),
        (["--kv-tier", "host:8GiB", "--kv-tier-timeout-ms", "0"], "at least 1"),
        (["--enable-hierarchical-cache"], "--kv-tier host:SIZE"),
    ],
)
def test_invalid_tiers_are_rejected_with_a_remedy(argv, words):
    with pytest.raises(SettingInvalid, match=words):
        read(*argv)


def test_kv_events_are_published_where_the_flags_name():
    config, _ = read(
        *("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://[::]:5558"),
        *("--kv-events-topic", "kv@a@m"),
    )
    events = config.kv_events
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:5557", "tcp://[::]:5558")
    assert events.topic == "kv@a@m"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-events-endpoint", "5557"], "use one such as tcp://"),
        (["--kv-events-endpoint", "tcp://*:many"], "use one such as tcp://"),
        (["--kv-events-replay-endpoint", "tcp://*:5558"], "need --kv-events-endpoint"),
        (["--kv-events-topic", "kv@a@m"], "need --kv-events-endpoint"),
        (["--kv-events-endpoint", "tcp://*:5557", "--disable-prefix-cache"], "prefix cache"),
    ],
)
def test_invalid_kv_events_are_rejected_with_a_remedy(argv, words):
    with pytest.raises(SettingInvalid, match=words):
        read(*argv)
