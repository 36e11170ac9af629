"""The receiving end of the shared directory: checks every batch, then copies it into the pool.

Each peer has a directory and a thread that polls it. The thread first reads a batch into separate memory,
which may hang with the file server. Only the copy from that memory into the pool holds the peer's `turn`,
so a revocation never waits for the directory.
"""

import itertools
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from tandem.kvtransfer.transports.base import Admission, PeerKey, Permits, Pool, new_peer_key
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tandem_file.batches import (
    BEAT_S,
    Batch,
    Pace,
    batches_in,
    beats,
    read_batch,
    remove,
    sweep,
)

log = get_logger("tandem_file")

# 30 s, counted in this listener's beats, because an outage of the file server stops all beats alike.
# The links of an owner that is silent for so long are already lost.
SWEEP_AFTER_BEATS = 120


class FileOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor. It names directories; the patterns prevent path traversal."""

    owner: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    peer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    nonce: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(eq=False, slots=True)
class _Peer:
    """One admitted peer. `turn` is held for each copy into the pool; no copy begins once `gone` is set."""

    path: Path
    permits: Permits
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    turn: threading.Lock = field(default_factory=threading.Lock)
    gone: threading.Event = field(default_factory=threading.Event)
    last_name: str = ""


class FileListener:
    """Keeps one directory for each peer, and a thread that polls it.

    Attributes:
        num_violations: Batches rejected because of their content.
    """

    def __init__(self, pool: Pool, directory: Path) -> None:
        self._pool, self._directory = pool, directory
        self._root = directory / f"tandem-{secrets.token_hex(8)}"
        self._peers: dict[PeerKey, _Peer] = {}
        self._closing = threading.Event()
        self.num_violations = 0
        try:
            self._beat(0)
        except OSError as error:
            raise ConfigInvalid(f"cannot make {self._root}: {error.strerror}") from error
        self._heart = threading.Thread(target=self._keep_beating, name="kv-beat", daemon=True)
        self._heart.start()

    def admit(self, toward_host: str) -> Admission:
        """Create a directory for one more peer."""
        del toward_host
        key = new_peer_key()
        peer = _Peer(self._root / key, Permits(self._pool))
        try:
            peer.path.mkdir(mode=0o700)
            (peer.path / "nonce").write_bytes(peer.nonce)
        except OSError as error:
            remove(peer.path)
            raise TransferRefused(f"cannot make {peer.path}: {error.strerror}") from error
        self._peers[key] = peer
        threading.Thread(target=self._serve, args=(peer,), name="kv-receive", daemon=True).start()
        owner = self._root.name.removeprefix("tandem-")
        offer = FileOffer(owner=owner, peer=key, nonce=peer.nonce.hex())
        return Admission(key, TransportOffer(name="file", descriptor=msgspec.structs.asdict(offer)))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Accept batches of `room` inside these pages."""
        known = self._peers[peer]
        with known.turn:
            known.permits.permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Stop accepting batches of `room`. Waits for at most one copy in memory, never for the directory."""
        if known := self._peers.get(peer):
            with known.turn:
                known.permits.revoke(room)

    def fence(self, peer: PeerKey) -> None:
        """Prevent further copies, wait for the one in progress, then remove the peer's directory."""
        if (known := self._peers.get(peer)) is None:
            return
        known.gone.set()
        with known.turn:
            self._peers.pop(peer, None)
        remove(known.path)

    def close(self) -> None:
        """Fence all peers and remove this listener's directory."""
        self._closing.set()
        self._heart.join()
        for peer in list(self._peers):
            self.fence(peer)
        remove(self._root)

    def _serve(self, peer: _Peer) -> None:
        pace = Pace()
        while not peer.gone.wait(pace.next_s()):
            for path in batches_in(peer.path):
                if self._take(peer, path):
                    pace.reset()

    def _take(self, peer: _Peer, path: Path) -> bool:
        """Land a batch or reject it; return whether the writer can see the result."""
        answer = ".landed"
        try:
            self._land(peer, path.name, read_batch(path, peer.nonce))
        except (FileNotFoundError, PeerLost):
            return False  # the writer abandoned the batch, or was fenced
        except (TransferRefused, OSError) as error:
            self.num_violations += 1
            log.warning("kv_batch.refused", reason=str(error))
            answer = ".refused"
        with suppress(OSError):
            path.rename(path.with_suffix(answer))
            return True
        return False

    def _land(self, peer: _Peer, name: str, batch: Batch) -> None:
        with peer.turn:
            if peer.gone.is_set():
                raise PeerLost("this peer was fenced")
            if name <= peer.last_name:
                raise TransferRefused(f"{name} came before")
            peer.last_name = name
            peer.permits.check(Room(batch.room), batch.plan)
            if len(batch.data) != batch.plan.total_bytes:
                raise TransferRefused("a batch of other bytes than its table says")
            pool, at = self._pool.region.array(), 0
            for _, to, size in batch.plan.copies():
                pool[to : to + size] = batch.data[at : at + size]
                at += size

    def _keep_beating(self) -> None:
        others = {path: beat for path, beat in beats(self._directory).items() if path != self._root}
        for count in itertools.count(1):
            if self._closing.wait(BEAT_S):
                return
            with suppress(OSError):
                self._beat(count)
            if count == SWEEP_AFTER_BEATS:
                sweep(self._directory, others)

    def _beat(self, count: int) -> None:
        # Recreated if another owner swept it: existing links are lost, later links work.
        self._root.mkdir(mode=0o700, exist_ok=True)
        (self._root / "beat").write_bytes(count.to_bytes(8, "little"))
