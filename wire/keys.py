"""Who may speak on node links: keys from one cluster secret, and when they are required."""

import hashlib
import os
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from wire.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """CURVE keys derived from the cluster's secret: who does not know it cannot speak or listen.

    The server's public key never crosses the network, so knowing it proves knowing the secret.
    """

    server_public: bytes
    server_secret: bytes

    @classmethod
    def from_secret(cls, secret: str) -> "ChannelKey":
        """Derive the keys.

        Raises:
            ConfigInvalid: libzmq was built without CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigInvalid("TANDEM_CLUSTER_KEY is set but this libzmq was built without CURVE")
        seed = hashlib.blake2b(secret.encode(), digest_size=32, person=b"tandem-curve").digest()
        private = z85.encode(seed)
        return cls(server_public=zmq.curve_public(private), server_secret=private)


def operator_key(secret: str) -> str:
    """Return what a request that changes the cluster bears, derived from its secret; empty without one.

    It opens no node link: who reads it off an unencrypted HTTP connection cannot speak on those.
    """
    if not secret:
        return ""
    return hashlib.blake2b(secret.encode(), digest_size=24, person=b"tandem-operator").hexdigest()


def is_loopback(host: str) -> bool:
    """Tell whether `host` can only be reached from this machine."""
    bare = host.strip("[]")
    return bare == "localhost" or bare.startswith("127.") or bare == "::1"


def cluster_key(host: str, *, is_insecure: bool, flag: str = "--host") -> ChannelKey | None:
    """Return the cluster's key from `TANDEM_CLUSTER_KEY`, or None for a plain channel.

    Called by `__main__` modules only.

    Args:
        flag: What the user gave the host with.

    Raises:
        ConfigInvalid: `host` can be reached from elsewhere, there is no secret and `is_insecure`
            was not asked for.
    """
    secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
    if secret:
        return ChannelKey.from_secret(secret)
    if is_loopback(host) or is_insecure:
        return None
    raise ConfigInvalid(
        f"{flag} {host} can be reached from other machines: set TANDEM_CLUSTER_KEY to one secret on "
        "every node and router, or pass --insecure to trust the network"
    )
