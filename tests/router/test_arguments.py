import pytest

from tandem.frontend.options import HttpOptions
from tandem.router.arguments import parse
from tandem.router.config import (
    AdmissionConfig,
    DnsTarget,
    PrefillTarget,
    QueueLimits,
    RouterConfig,
    host_of,
)
from tandem.router.membership.sources import sources_of
from tandem.router.stock_options import StockOptions
from tandem.settings.flags import SettingInvalid

P, Q, D, E = "http://p:7000", "http://q:7000", "http://d:7001", "http://e:7001"

FORMS = [
    # of today's SGLang router: repeated, the port behind the URL
    (
        f"--pd-disaggregation --prefill {P} 8998 --prefill {Q} none --decode {D} --decode {E}",
        (PrefillTarget(P, 8998), PrefillTarget(Q)),
        (D, E),
    ),
    # of mini_lb: lists after one flag, ports apart
    (
        f"--prefill {P} {Q} --prefill-bootstrap-ports 8998 8999 --decode {D} {E}",
        (PrefillTarget(P, 8998), PrefillTarget(Q, 8999)),
        (D, E),
    ),
    (f"--prefill {P} --decode {D}", (PrefillTarget(P),), (D,)),
    (
        f"--prefill {P} 8998 {Q} 8999 --decode {D}",
        (PrefillTarget(P, 8998), PrefillTarget(Q, 8999)),
        (D,),
    ),
    (
        f"--decode {D} --prefill {P} --prefill {Q} --prefill-bootstrap-ports none "
        "--prefill-bootstrap-ports 8999",
        (PrefillTarget(P), PrefillTarget(Q, 8999)),
        (D,),
    ),
    (
        "--prefill http://[::1]:7000/ 8998 --decode http://[::1]:7001",
        (PrefillTarget("http://[::1]:7000", 8998),),
        ("http://[::1]:7001",),
    ),
]


def test_engines_are_listed_by_the_name_of_their_adapter():
    config = parse(
        ["--prefill", "vllm+http://P:8000/", "--decode", "vllm+https://d:8000", "http://e:7001"]
    )
    assert config.prefills == (PrefillTarget("vllm+http://p:8000"),)
    assert config.decodes == ("vllm+https://d:8000", E)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("trt+http://d:8000", "use one of vllm"),
        ("vllm+d:8000", "is not a node's URL: use http://HOST:PORT"),
        ("vllm+http://d:8000/v1", "has no path; use vllm\\+http://HOST:PORT"),
    ],
)
def test_bad_urls_of_engines_are_refused_with_what_to_use(url, advice):
    with pytest.raises(SettingInvalid, match=advice):
        parse(["--prefill", P, "--decode", url])


@pytest.mark.parametrize(("line", "prefills", "decodes"), FORMS)
def test_both_launch_forms_name_the_same_nodes(line, prefills, decodes):
    config = parse(line.split())
    assert (config.prefills, config.decodes) == (prefills, decodes)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--host 0.0.0.0 --port 8123", "port", 8123),
        ("--host [::1]", "host", "::1"),
        ("--workers 4", "num_workers", 4),
        ("--detokenizers 4", "num_workers", 4),
        ("--detokenizer-worker-num 3", "num_workers", 3),
        ("--tokenizer-worker-num 2", "num_workers", 2),
        ("--policy power_of_two", "policy", "power_of_two"),
        ("--policy cache_aware", "policy", "cache_aware"),
        ("--policy consistent_hash", "policy", "session"),
        ("--prefill-policy cache_aware", "prefill_policy", "cache_aware"),
        ("--decode-policy power_of_two", "decode_policy", "power_of_two"),
        ("--api-key a --api-key b", "http", HttpOptions(api_keys=("a", "b"))),
        ("--cors-allow-origin *", "http", HttpOptions(cors_origins=("*",))),
        ("--max-payload-size 9", "http", HttpOptions(max_body_bytes=9)),
        ("--request-timeout-secs 9", "http", HttpOptions(request_timeout_s=9)),
        ("--log-level WARNING", "log_level", "warning"),
        (
            "--kv-events-endpoint tcp://*:5557",
            "engines",
            StockOptions(kv_events_endpoint="tcp://*:5557"),
        ),
        ("--tokenizer /models/m", "tokenizer_dir", "/models/m"),
        (
            "--mini-lb --prometheus-port 29000 --mini-lb",
            "ignored_flags",
            ("--mini-lb", "--prometheus-port"),
        ),
    ],
)
def test_flags_of_other_routers_are_accepted(flags, field, value):
    config = parse([*f"--prefill {P} --decode {D}".split(), *flags.split()])
    assert getattr(config, field) == value


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"--prefill {P}", "at least one --prefill URL and one --decode URL, or a source of nodes"),
        (f"--prefill {P} --decode http://u:p@d:1", "not a node's URL"),
        (f"--prefill {P} --decode http://d:1?x=1", "not a node's URL"),
        (f"--prefill {P} --decode http://p:7000 HTTP://P:7000/", "pass each node once"),
        (f"--prefill {P} --decode 127.0.0.1:7001", "not a node's URL: use http://HOST:PORT"),
        (f"--prefill {P} --decode http://d", "not a node's URL"),
        (f"--prefill {P} --decode http://d:x", "not a node's URL"),
        (f"--prefill {P} --decode http://a..b:1", "not a node's URL"),
        (
            f"--prefill {P} --decode {D} --host a..b",
            "--host a..b is not a host: use an address, or a name",
        ),
        (f"--prefill 8998 {P} --decode {D}", "put a bootstrap port after its URL"),
        (f"--prefill {P} 8998 8999 --decode {D}", "put a bootstrap port after its URL"),
        (f"--prefill {P} 99999 --decode {D}", "use 1 to 65535"),
        (f"--prefill {P} {Q} --prefill-bootstrap-ports 1 --decode {D}", "1 ports for 2 prefill"),
        (f"--prefill {P} --decode {D} {D}", "pass each node once"),
        (f"--prefill {P} --decode {D} --kv-events-endpoint :5557", "is not an endpoint"),
        (
            f"--prefill {P} --decode {D} --kv-events-replay-endpoint tcp://*:5558",
            "needs --kv-events-endpoint",
        ),
        (f"--prefill {P} --decode {D} --workers 0", "at least 1"),
        (f"--prefill {P} --decode {D} --port 70000", "--port is 70000"),
        (f"--prefill {P} --decode ftp://d:1", "use http://HOST:PORT or https://HOST:PORT"),
        (
            f"--prefill {P} --decode {D} --tool-call-parser x",
            "--tool-call-parser: unknown parser 'x'",
        ),
    ],
)
def test_invalid_setting_is_rejected_with_a_remedy(line, sentence):
    with pytest.raises(SettingInvalid, match=sentence):
        parse(line.split())


def test_unknown_flag_error_suggests_the_nearest_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(f"--prefill {P} --decode {D} --polcy random".split())
    assert ended.value.code == 2
    answer = "tandem lb: error: there is no flag --polcy: did you mean --policy?\n"
    assert capsys.readouterr().err == answer


def test_timeout_flag_of_other_routers_is_rejected_with_ours(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(f"--prefill {P} --decode {D} --timeout 300".split())
    assert ended.value.code == 2
    answer = (
        "tandem lb: error: there is no flag --timeout: use --request-timeout-s for the longest time "
        "that a request may take\n"
    )
    assert capsys.readouterr().err == answer


def test_model_flags_take_several_names_and_a_parser_for_each_model():
    config = parse(
        [
            *("--prefill", P, "--decode", D, "--served-model-name", "m", "alias", "m"),
            *("--tool-call-parser", "hermes", "--tool-call-parser", "b=llama3"),
            *("--reasoning-parser", "b=think"),
        ]
    )
    assert config.served_model_names == ("m", "alias")
    assert config.tool_call_parsers == ("hermes", "b=llama3")
    assert config.reasoning_parsers == ("b=think",)
    assert config.is_one_model
    with pytest.raises(SettingInvalid, match="unknown parser 'nosuch'"):
        parse(["--prefill", P, "--decode", D, "--reasoning-parser", "b=nosuch"])


def test_old_name_of_the_workers_flag_works_as_a_variable(monkeypatch):
    monkeypatch.setenv("TANDEM_DETOKENIZERS", "3")
    assert parse(f"--prefill {P} --decode {D}".split()).num_workers == 3


def test_help_shows_both_forms(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--prefill-bootstrap-ports 8998 8998" in shown
    assert "--pd-disaggregation" in shown


def test_configuration_repr_hides_secrets():
    config = RouterConfig(
        prefills=(PrefillTarget(P),),
        decodes=(D,),
        http=HttpOptions(api_keys=("k3y",)),
        cluster_secret="s3cret",
    )
    assert "k3y" not in repr(config)
    assert "s3cret" not in repr(config)


def test_host_of_an_ipv6_url_has_no_brackets():
    assert host_of("http://[fe80::1]:7000") == "fe80::1"


NODES = ["--prefill", P, "--decode", D]


def test_admission_flags_set_the_limits():
    argv = ["--max-in-flight", "7", "--max-queued-requests", "0", "--max-queued-tokens", "5"]
    config = parse([*NODES, *argv, "--max-queue-wait-s", "2.5", "--no-admission"])
    limits = QueueLimits(max_requests=0, max_tokens=5, max_wait_s=2.5)
    assert config.admission == AdmissionConfig(is_on=False, max_in_flight=7, limits=limits)
    assert parse(NODES).admission == AdmissionConfig()


@pytest.mark.parametrize("argv", [["--max-in-flight", "-1"], ["--max-queue-wait-s", "nan"]])
def test_limit_out_of_range_is_rejected(argv):
    with pytest.raises(SettingInvalid, match=argv[0]):
        parse([*NODES, *argv])


def test_dns_names_take_an_optional_role():
    line = "--discover-dns prefill=p.x:7000 decode=d.x:7001 --discover-dns any.x:1"
    config = parse(line.split())
    assert config.dns == (
        DnsTarget("p.x", 7000, "prefill"),
        DnsTarget("d.x", 7001, "decode"),
        DnsTarget("any.x", 1),
    )
    assert sources_of(config)[0].name == "dns prefill=p.x:7000"


@pytest.mark.parametrize(
    "line",
    ["--discover-announced", "--discover-dns d.x:1", "--decode http://d:1 --discover-dns p:1"],
)
def test_discovery_source_replaces_listed_nodes(line):
    assert isinstance(parse(line.split()), RouterConfig)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--discover-dns d.x", "--discover-dns d.x is invalid: use prefill=HOST:PORT"),
        ("--discover-dns router=d.x:1", "use prefill=HOST:PORT"),
        ("--discover-dns prefill=d.x:99999", "use prefill=HOST:PORT"),
    ],
)
def test_invalid_discovery_source_is_rejected_with_a_remedy(line, sentence):
    with pytest.raises(SettingInvalid, match=sentence):
        parse(line.split())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--discover-kubernetes --kubernetes-port http", "--discover-kubernetes was removed"),
        ("--kubernetes-decode-selector role=decode", "--kubernetes-decode-selector was removed"),
        ("--service-discovery", "there is no flag --service-discovery"),
        ("--prefill-selector app=p", "there is no flag --prefill-selector"),
    ],
)
def test_removed_pod_listing_flags_are_rejected_in_favor_of_dns(line, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    instead = "use --discover-dns ROLE=HOST:PORT with the name of a headless Service"
    assert capsys.readouterr().err == f"tandem lb: error: {sentence}: {instead}\n"
