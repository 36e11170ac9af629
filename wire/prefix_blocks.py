"""What a prefix of tokens is called between nodes and routers: one 64-bit name for each block of it.

A block is `BLOCK_TOKENS` tokens, whatever a node's page size, so that a router names a prompt once for
all nodes. Its name follows from all tokens up to its end and from the cache salt: whoever has the
block has what stands before it, and two tenants share no name.

Names are hints. Two prefixes with one name would send a request to a node that has less than was
thought, never give it the KV of another: the node compares the tokens themselves.
"""

import struct
from collections.abc import Sequence

import xxhash

# A name saved here is a name more to tell, hold and look up; a token not seen as cached is one that a
# policy believes it has to compute: 128 are 5 ms of a 70B model on eight H100.
BLOCK_TOKENS = 128
NAME_BYTES = 8
# As many as one node tells of: 8 million tokens, several times what the largest pools hold.
MAX_BLOCKS = 1 << 16


def root_name(salt: str = "") -> int:
    """Return what stands before the first block."""
    return xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0


def next_name(before: int, token_ids: Sequence[int]) -> int:
    """Return the name of the block with these tokens behind the one named `before`."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}q", *token_ids), before)


def block_names(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """Return the names of a prompt's whole blocks, in order."""
    name, names = root_name(salt), []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        name = next_name(name, token_ids[end - BLOCK_TOKENS : end])
        names.append(name)
    return names


def pack_names(names: Sequence[int]) -> bytes:
    """Return names as a message carries them."""
    return struct.pack(f"<{len(names)}Q", *names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """Return the names in `data`; a rest that is no whole name is passed over."""
    count = len(data) // NAME_BYTES
    return struct.unpack_from(f"<{count}Q", data)
