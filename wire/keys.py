"""Who may speak on node links: keys from one cluster secret, and when they are required."""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid

log = get_logger(__name__)

# A guess costs 16 MiB and 50 ms of a core, ours and a guesser's, who has an operator's key off a plain
# HTTP connection or a recorded handshake to try it on. A process pays once, at its start.
SCRYPT_COST, SCRYPT_BLOCK = 1 << 14, 8
# `openssl rand -hex 32` has 64; a password of a person that is shorter than this is in word lists.
SHORTEST_SECRET = 16


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """CURVE keys derived from the cluster's secret: who does not know it cannot speak or listen.

    The server's public key never crosses the network, so knowing it proves knowing the secret.
    """

    server_public: bytes
    server_secret: bytes

    @classmethod
    def from_secret(cls, secret: str) -> "ChannelKey":
        """Derive the keys."""
        if not zmq.has("curve"):
            raise ConfigInvalid("TANDEM_CLUSTER_KEY is set but this libzmq was built without CURVE")
        seed = _derived(secret, b"tandem-curve", 32)
        private = z85.encode(seed)
        return cls(server_public=zmq.curve_public(private), server_secret=private)


def operator_key(secret: str) -> str:
    """Return the admin key, derived from the cluster's secret; empty without one.

    It opens no node link, though it may be read off an unencrypted HTTP connection.
    """
    return _derived(secret, b"tandem-operator", 24).hex() if secret else ""


def reader_key(operator: str) -> str:
    """Return what a router shows to nodes, derived from the admin key, which it does not reveal."""
    if not operator:
        return ""
    return hashlib.blake2b(operator.encode(), digest_size=24, person=b"tandem-reader").hexdigest()


def warn_of_weak_secret(secret: str) -> None:
    """Log a warning for a cluster's secret that is short enough to be guessed; empty is none."""
    if 0 < len(secret) < SHORTEST_SECRET:
        log.warning(
            "cluster_key.weak",
            num_characters=len(secret),
            action="make TANDEM_CLUSTER_KEY with `openssl rand -hex 32`",
            see="tandem docs threat-model#secrets",
        )


def is_loopback(host: str) -> bool:
    """Tell whether `host` can only be reached from this machine."""
    bare = host.strip("[]")
    return bare == "localhost" or bare.startswith("127.") or bare == "::1"


def cluster_key(host: str, *, is_insecure: bool, flag: str = "--host") -> ChannelKey | None:
    """Return the cluster's key from `TANDEM_CLUSTER_KEY`, or None for a plain channel. For `__main__` only.

    Raises:
        ConfigInvalid: `host` can be reached from elsewhere without a secret; names `flag`.
    """
    secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
    if secret:
        return ChannelKey.from_secret(secret)
    if is_loopback(host) or is_insecure:
        return None
    raise ConfigInvalid(
        f"{flag} {host} can be reached from other machines: set TANDEM_CLUSTER_KEY to one secret on "
        "every node and router, or pass --insecure to trust the network",
        topic="troubleshooting#no-cluster-key",
    )


def _derived(secret: str, purpose: bytes, size_bytes: int) -> bytes:
    """Return a key for one purpose; it tells nothing of the secret, nor of the other keys."""
    return hashlib.blake2b(_stretched(secret), digest_size=size_bytes, person=purpose).digest()


@lru_cache(maxsize=1)
def _stretched(secret: str) -> bytes:
    # The salt is the same for all clusters: nodes share nothing else from which to make one.
    return hashlib.scrypt(
        secret.encode(), salt=b"tandem-cluster", n=SCRYPT_COST, r=SCRYPT_BLOCK, p=1, dklen=32
    )
