import pytest

from tandem.kvtransfer.transports.nixl import check_environment
from tandem.wire.errors import ConfigInvalid


@pytest.mark.parametrize("links", ["all", "rc,cma", "^ib", "posix,tcp", "tcp,sm"])
def test_links_that_cannot_be_fenced_are_refused_by_name(monkeypatch, links):
    monkeypatch.setenv("UCX_TLS", links)
    with pytest.raises(ConfigInvalid, match="cannot be cut off"):
        check_environment()


@pytest.mark.parametrize("threshold", ["8192", "auto"])
def test_a_setting_with_which_ucx_aborts_is_refused(monkeypatch, threshold):
    monkeypatch.setenv("UCX_RNDV_THRESH", threshold)
    with pytest.raises(ConfigInvalid, match=f"UCX_RNDV_THRESH={threshold} makes UCX abort"):
        check_environment()


@pytest.mark.parametrize("links", ["", "rc_x,tcp"])
def test_links_that_can_be_fenced_may_be_named(monkeypatch, links):
    monkeypatch.setenv("UCX_TLS", links)
    check_environment()
