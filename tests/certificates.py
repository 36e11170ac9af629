"""Certificates of an authority created for a test."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """An authority, its certificate for loopback as PEM files, a mismatched key and an invalid file."""

    authority: trustme.CA
    ca: str
    cert: str
    key: str
    both: str
    other_key: str
    no_pem: str


def make_certificates(folder: Path) -> Certificates:
    authority = trustme.CA()
    cert, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    parts = {
        "ca": authority.cert_pem.bytes(),
        "cert": cert.cert_chain_pems[0].bytes(),
        "key": cert.private_key_pem.bytes(),
        "both": cert.private_key_and_cert_chain_pem.bytes(),
        "other_key": other.private_key_pem.bytes(),
        "no_pem": b"hello\n",
    }
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    return Certificates(authority, **{name: str(folder / name) for name in parts})
