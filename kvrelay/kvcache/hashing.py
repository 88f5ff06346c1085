"""Content hashes of KV blocks. Knows layouts, salts and token ids; imports no torch, since the router needs it too.

A block's hash is BLAKE2b-128 over its parent's hash and its own token ids as little-endian u32, so equal hashes mean
equal KV: the whole prefix, the model, the layout and the tenant agree. It depends on no process, platform or hash seed.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.types import LayoutFingerprint

DIGEST_BYTES = 16
"""Size of every hash here."""


def root_hash(layout: LayoutFingerprint, salt: str = "") -> bytes:
    """The parent of every first block: KV is shared only among equal layouts and equal tenant salts."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvrelay-root")
    for name in LayoutFingerprint.__slots__:
        _update(digest, f"{name}={getattr(layout, name)}")
    _update(digest, salt)
    return digest.digest()


def block_hashes(root: bytes, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Hashes of the whole blocks of `ids`, chained from `root`; a last, partial block has none.

    `root` may be the hash of an earlier block: the result then continues that chain. Ids are in [0, 2^32), else
    struct.error.
    """
    hashes: list[bytes] = []
    parent = root
    whole = len(ids) // block_tokens * block_tokens
    data, size = struct.pack(f"<{whole}I", *ids[:whole]), 4 * block_tokens
    for start in range(0, len(data), size):
        parent = hashlib.blake2b(parent + data[start : start + size], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


def _update(digest: "hashlib.blake2b", text: str) -> None:
    """Length first, so that no two lists of texts give the same bytes."""
    data = text.encode()
    digest.update(struct.pack("<I", len(data)))
    digest.update(data)
