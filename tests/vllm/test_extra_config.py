"""`kv_connector_extra_config` has the options of the transfer, by the names of a node's flags."""

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.vllm.node.environment import extra_config
from tandem.vllm.worker import HandOffConfig, read_hand_off_config
from tandem.wire.errors import ConfigInvalid

CHANGED = TransferConfig(
    backend="tcp",
    interface="lo",
    devices="mlx5_0",
    port=9100,
    bootstrap_port=9001,
    grant_timeout_s=1.5,
    early_grant_timeout_s=2.5,
    landed_timeout_s=3.5,
    push_granularity="chunk",
    verify="off",
)


def names(struct) -> set[str]:
    return {each.name for each in msgspec.structs.fields(struct)}


def read(**extra) -> HandOffConfig:
    return read_hand_off_config(extra, role="prefill", fingerprint="f")


def test_empty_config_has_the_defaults_of_a_node():
    assert read() == HandOffConfig(role="prefill", fingerprint="f")
    defaults = msgspec.structs.asdict(TransferConfig())
    assert defaults.items() <= msgspec.structs.asdict(read()).items()


def test_defaults_of_the_transfer():
    assert msgspec.to_builtins(TransferConfig()) == {
        "transfer_backend": "auto",
        "transfer_interface": "",
        "transfer_device": "",
        "transfer_port": 0,
        "bootstrap_port": 8998,
        "grant_timeout_s": 300.0,
        "early_grant_timeout_s": 30.0,
        "landed_timeout_s": 600.0,
        "push_granularity": "layer",
        "verify_kv": "auto",
    }


def test_every_option_of_a_node_reaches_its_vllm_workers():
    default = msgspec.structs.asdict(TransferConfig())
    changed = msgspec.structs.asdict(CHANGED)
    assert all(changed[name] != default[name] for name in default)
    found = read(**msgspec.to_builtins(CHANGED))
    assert changed.items() <= msgspec.structs.asdict(found).items()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_links_of_every_engine_have_the_settings_of_the_node(role):
    node = NodeConfig(
        role=role,
        engine=EngineConfig(model_dir="/m"),
        transfer=CHANGED,
        host="127.0.0.2",
        is_insecure=True,
        heartbeat_interval_ms=250.0,
    )
    found = read_hand_off_config(extra_config(node), role=role, fingerprint="f")
    shared = (names(HandOffConfig) - names(TransferConfig)) & names(NodeConfig)
    assert shared == {"role", "host", "is_insecure", "heartbeat_interval_ms"}
    assert all(getattr(found, name) == getattr(node, name) for name in shared)
    assert found.heartbeat == node.heartbeat


def test_heartbeat_interval_out_of_range_is_refused():
    with pytest.raises(ConfigInvalid, match="heartbeat-interval-ms 1 is out of range"):
        read(heartbeat_interval_ms=1.0)


def test_fingerprint_in_the_config_replaces_the_nodes_own():
    assert read(fingerprint="other").fingerprint == "other"


@pytest.mark.parametrize("name", ["grant_timeout", "backend", "verify"])
def test_unknown_key_is_refused_by_name(name):
    with pytest.raises(ConfigInvalid, match=f"unknown: {name}; remove it"):
        read(**{name: "tcp"})


def test_value_of_the_wrong_type_is_refused_with_its_key():
    with pytest.raises(ConfigInvalid, match=r"kv_connector_extra_config: .*verify_kv"):
        read(verify_kv="never")
