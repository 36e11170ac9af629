import pytest

from tandem.kvtransfer.transports import base
from tandem.kvtransfer.transports.nixl import LINKS, NixlTransport, ucx_settings
from tandem.wire.errors import ConfigInvalid

UNFENCED, ABORTING = "cannot be cut off", "makes UCX abort"


@pytest.mark.parametrize(
    ("variable", "value", "fault"),
    [
        *(
            ("UCX_TLS", links, UNFENCED)
            for links in ("all", "rc,cma", "^ib", "posix,tcp", "tcp,sm")
        ),
        *(("UCX_RNDV_THRESH", size, ABORTING) for size in ("8192", "auto")),
    ],
)
def test_environment_that_breaks_the_fence_is_refused(monkeypatch, variable, value, fault):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigInvalid, match=fault):
        NixlTransport()


@pytest.mark.parametrize("links", ["", "rc_x,tcp"])
def test_links_that_can_be_fenced_may_be_named(monkeypatch, links):
    monkeypatch.setenv("UCX_TLS", links)
    assert ucx_settings("") == {"UCX_TLS": links or LINKS}


def test_every_device_is_named_with_its_port_to_ucx(monkeypatch, tmp_path):
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(base, "RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_TLS", raising=False)
    config = base.TransportConfig(devices=("mlx5_0", "mlx5_1:2", "eth0"))
    settings = ucx_settings(config.ucx_devices)
    assert settings == {"UCX_TLS": LINKS, "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:2,eth0"}


def test_settings_of_an_agent_made_at_the_same_time_are_no_fault(monkeypatch):
    monkeypatch.setenv("UCX_TLS", LINKS)
    assert ucx_settings("eth0") == {"UCX_TLS": LINKS, "UCX_NET_DEVICES": "eth0"}
