import pytest

from tandem.frontend.options import HttpOptions
from tandem.router.arguments import parse
from tandem.router.command import in_pod
from tandem.router.config import (
    AdmissionConfig,
    DnsTarget,
    KubernetesTarget,
    Limits,
    PrefillTarget,
    RouterConfig,
    host_of,
)
from tandem.router.discovery import sources_of
from tandem.wire.errors import ConfigInvalid

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


@pytest.mark.parametrize(("line", "prefills", "decodes"), FORMS)
def test_both_launch_forms_name_the_same_nodes(line, prefills, decodes):
    config = parse(line.split())
    assert (config.prefills, config.decodes) == (prefills, decodes)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--host 0.0.0.0 --port 8123", "port", 8123),
        ("--host [::1]", "host", "::1"),
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
        ("--tokenizer /models/m", "tokenizer_dir", "/models/m"),
        (
            "--mini-lb --prometheus-port 29000 --mini-lb",
            "ignored_flags",
            ("--mini-lb", "--prometheus-port"),
        ),
    ],
)
def test_familiar_flags_are_taken(flags, field, value):
    config = parse([*f"--prefill {P} --decode {D}".split(), *flags.split()])
    assert getattr(config, field) == value


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"--prefill {P}", "at least one --prefill URL and one --decode URL, or say where nodes"),
        (f"--prefill {P} --decode http://u:p@d:1", "not a node's URL"),
        (f"--prefill {P} --decode http://d:1?x=1", "not a node's URL"),
        (f"--prefill {P} --decode http://p:7000 HTTP://P:7000/", "each node is given once"),
        (f"--prefill {P} --decode 127.0.0.1:7001", "not a node's URL: give http://HOST:PORT"),
        (f"--prefill {P} --decode http://d", "not a node's URL"),
        (f"--prefill {P} --decode http://d:x", "not a node's URL"),
        (f"--prefill {P} --decode http://a..b:1", "not a node's URL"),
        (f"--prefill {P} --decode {D} --host a..b", "--host a..b: give an address, or a name"),
        (f"--prefill 8998 {P} --decode {D}", "follows the URL it is of"),
        (f"--prefill {P} 8998 8999 --decode {D}", "follows the URL it is of"),
        (f"--prefill {P} 99999 --decode {D}", "neither 1 to 65535"),
        (f"--prefill {P} {Q} --prefill-bootstrap-ports 1 --decode {D}", "1 ports for 2 prefill"),
        (f"--prefill {P} --decode {D} {D}", "each node is given once"),
        (f"--prefill {P} --decode {D} --detokenizers 0", "at least 1"),
        (f"--prefill {P} --decode {D} --port 70000", "--port is 70000"),
        (f"--prefill {P} --decode ftp://d:1", "give http://HOST:PORT or https://HOST:PORT"),
        (
            f"--prefill {P} --decode {D} --tool-call-parser x",
            "--tool-call-parser: 'x' is not known",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(line, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        parse(line.split())


def test_an_unknown_flag_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(f"--prefill {P} --decode {D} --polcy random".split())
    assert ended.value.code == 2
    answer = "tandem lb: error: there is no flag --polcy: did you mean --policy?\n"
    assert capsys.readouterr().err == answer


def test_help_shows_both_forms(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--prefill-bootstrap-ports 8998 8998" in shown
    assert "--pd-disaggregation" in shown


def test_a_secret_is_not_shown_with_the_configuration():
    config = RouterConfig(
        prefills=(PrefillTarget(P),),
        decodes=(D,),
        http=HttpOptions(api_keys=("k3y",)),
        cluster_secret="s3cret",
    )
    assert "k3y" not in repr(config)
    assert "s3cret" not in repr(config)


def test_the_host_of_an_ipv6_url_has_no_brackets():
    assert host_of("http://[fe80::1]:7000") == "fe80::1"


NODES = ["--prefill", P, "--decode", D]


def test_flags_say_how_many_start_and_who_waits():
    argv = ["--max-in-flight", "7", "--max-queued-requests", "0", "--max-queued-tokens", "5"]
    config = parse([*NODES, *argv, "--max-queue-wait-s", "2.5", "--no-admission"])
    limits = Limits(max_requests=0, max_tokens=5, max_wait_s=2.5)
    assert config.admission == AdmissionConfig(is_on=False, max_in_flight=7, limits=limits)
    assert parse(NODES).admission == AdmissionConfig()


@pytest.mark.parametrize("argv", [["--max-in-flight", "-1"], ["--max-queue-wait-s", "nan"]])
def test_a_limit_that_is_none_is_refused(argv):
    with pytest.raises(ConfigInvalid, match=argv[0]):
        parse([*NODES, *argv])


PODS = "--discover-kubernetes --kubernetes-prefill-selector app=t,role=prefill"


def test_names_are_taken_with_a_role_or_without_one():
    line = "--discover-dns prefill=p.x:7000 decode=d.x:7001 --discover-dns any.x:1"
    config = parse(line.split())
    assert config.dns == (
        DnsTarget("p.x", 7000, "prefill"),
        DnsTarget("d.x", 7001, "decode"),
        DnsTarget("any.x", 1),
    )
    assert sources_of(config)[0].name == "dns prefill=p.x:7000"


def test_pods_are_found_by_the_labels_of_each_role(tmp_path):
    line = f"{PODS} --kubernetes-decode-selector role=decode --kubernetes-namespace inference"
    config = parse([*line.split(), "--kubernetes-api", "http://127.0.0.1:8001"])
    assert config.kubernetes == KubernetesTarget(
        is_on=True,
        api_url="http://127.0.0.1:8001",
        namespace="inference",
        prefill_selector="app=t,role=prefill",
        decode_selector="role=decode",
    )
    assert [source.name for source in sources_of(config)] == [
        "kubernetes prefill app=t,role=prefill in inference",
        "kubernetes decode role=decode in inference",
    ]


@pytest.mark.parametrize(
    "line", ["--discover-announced", "--discover-dns d.x:1", PODS, f"--decode http://d:1 {PODS}"]
)
def test_with_a_source_no_node_need_be_listed(line):
    assert isinstance(parse(line.split()), RouterConfig)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--discover-dns d.x", "--discover-dns d.x: give prefill=HOST:PORT"),
        ("--discover-dns router=d.x:1", "give prefill=HOST:PORT"),
        ("--discover-dns prefill=d.x:99999", "give prefill=HOST:PORT"),
        ("--discover-kubernetes", "give the labels of the pods"),
        ("--kubernetes-decode-selector a=b", "--discover-kubernetes goes with"),
    ],
)
def test_a_source_that_cannot_work_is_refused_with_what_to_do(line, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        parse(line.split())


def test_in_a_pod_the_api_is_that_of_its_environment():
    target = KubernetesTarget(decode_selector="a=b")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert in_pod(target, environment).api_url == "https://[fd00::1]:6443"
    given = KubernetesTarget(api_url="http://127.0.0.1:8001")
    assert in_pod(given, environment) is given
    assert in_pod(None, environment) is None
    with pytest.raises(ConfigInvalid, match="this is no pod"):
        in_pod(target, {})
