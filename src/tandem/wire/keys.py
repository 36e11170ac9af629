"""Authentication of node links: keys derived from the cluster's secret, and when they are required."""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid

log = get_logger(__name__)

# Each guess costs an attacker 16 MiB and 50 ms of a core. An operator key seen on plain HTTP or a recorded
# handshake allows offline guessing. A process pays the cost once, at its start.
SCRYPT_COST, SCRYPT_BLOCK = 1 << 14, 8
# Minimum number of characters. `openssl rand -hex 32` prints 64; people's shorter passwords are in word lists.
SHORTEST_SECRET = 16


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """CURVE keys derived from the cluster's secret; without the secret nobody can connect or listen.

    The server's public key never crosses the network, so having it proves knowledge of the secret.
    """

    server_public: bytes
    server_secret: bytes

    @classmethod
    def from_secret(cls, secret: str) -> "ChannelKey":
        """Derive the keys."""
        if not zmq.has("curve"):
            raise ConfigInvalid(
                "TANDEM_CLUSTER_KEY is set and this libzmq was built without CURVE; install pyzmq from PyPI, "
                "whose libzmq has it"
            )
        seed = _derived(secret, b"tandem-curve", 32)
        private = z85.encode(seed)
        return cls(server_public=zmq.curve_public(private), server_secret=private)


def operator_key(secret: str) -> str:
    """Return the admin key, derived from the cluster's secret; empty without a secret.

    It does not open node links: plain HTTP may have exposed it.
    """
    return _derived(secret, b"tandem-operator", 24).hex() if secret else ""


def reader_key(operator: str) -> str:
    """Return the key that a router sends to nodes. It is derived from the admin key and does not reveal it."""
    if not operator:
        return ""
    return hashlib.blake2b(operator.encode(), digest_size=24, person=b"tandem-reader").hexdigest()


def warn_of_weak_secret(secret: str) -> None:
    """Log a warning if the cluster's secret is short enough to be guessed. Empty: there is no secret."""
    if 0 < len(secret) < SHORTEST_SECRET:
        log.warning(
            "cluster_key.weak",
            num_characters=len(secret),
            action="generate TANDEM_CLUSTER_KEY with `openssl rand -hex 32`",
            see="docs/threat-model.md#secrets",
        )


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    bare = host.strip("[]")
    return bare == "localhost" or bare.startswith("127.") or bare == "::1"


def cluster_key(host: str, *, is_insecure: bool, flag: str = "--host") -> ChannelKey | None:
    """Return the key of `TANDEM_CLUSTER_KEY`, or None for an unencrypted channel. Only commands call this.

    Raises:
        ConfigInvalid: Other machines can reach `host`, and there is no secret. The message names `flag`.
    """
    secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
    if secret:
        return ChannelKey.from_secret(secret)
    if is_loopback(host) or is_insecure:
        return None
    raise ConfigInvalid(
        f"{flag} {host} can be reached from other machines: set TANDEM_CLUSTER_KEY to the same secret on "
        "every node and router, or pass --insecure to trust the network",
        topic="docs/troubleshooting.md#no-cluster-key",
    )


def _derived(secret: str, purpose: bytes, size_bytes: int) -> bytes:
    """Return a key for one purpose. It reveals neither the secret nor the other keys."""
    return hashlib.blake2b(_stretched(secret), digest_size=size_bytes, person=purpose).digest()


@lru_cache(maxsize=1)
def _stretched(secret: str) -> bytes:
    # The salt is the same for all clusters: nodes share nothing else that could serve as one.
    return hashlib.scrypt(
        secret.encode(), salt=b"tandem-cluster", n=SCRYPT_COST, r=SCRYPT_BLOCK, p=1, dklen=32
    )
