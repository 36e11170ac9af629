"""Supported versions of vLLM: what Tandem uses must be there, whatever the number."""

import importlib.metadata

import pytest
from typing_extensions import override

from tandem.vllm.versions import check_interface, check_version
from tandem.wire.errors import ConfigInvalid


@pytest.fixture
def install(monkeypatch):
    def install(version):
        monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)

    install("0.32.0+cpu")
    return install


class Base:
    def kept(self) -> None:
        """Do nothing."""

    @classmethod
    def kept_too(cls) -> None:
        """Do nothing."""


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1+cpu", "0.40.0rc1", "1.0"])
def test_later_version_is_accepted(install, version):
    install(version)
    assert check_version() == version


def test_old_version_is_refused(install):
    install("0.30.2")
    with pytest.raises(ConfigInvalid, match=r"vLLM 0\.30\.2 is too old: install 0\.31 or later"):
        check_version()


def test_method_that_vllm_no_longer_calls_is_refused_by_name(install):
    class Connector(Base):
        @override
        def kept(self) -> None:
            """Do nothing."""

        @classmethod
        @override
        def kept_too(cls) -> None:
            """Do nothing."""

        def own(self) -> None:
            """Do nothing."""

    check_interface(Connector)
    Connector.gone = override(lambda self: None)
    with pytest.raises(ConfigInvalid, match=r"vLLM 0\.32.* connectors have no gone"):
        check_interface(Connector)
