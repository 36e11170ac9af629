import pytest

from tandem.router.arguments import parse
from tandem.router.command import in_pod
from tandem.router.config import DnsTarget, KubernetesTarget, RouterConfig
from tandem.router.discovery import sources_of
from tandem.wire.errors import ConfigInvalid

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
def test_what_cannot_work_is_refused_with_what_to_do(line, sentence):
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
