"""The files that make a tokenizer, as they travel from a node to a router without a model.

Holds which files count, their hash, and how they are read and kept. What they mean is in
`frontend/tokenizer.py`.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from tandem.wire.errors import ConfigInvalid

# Only these names are ever read or written: a peer cannot name a path of its own.
TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Begins what git checks out in place of a file that it did not fetch.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Gemma 3's tokenizer.json, among the largest published, is 33 MB.
MAX_FILE_BYTES = 64 * 1024 * 1024


def tokenizer_files(directory: Path) -> dict[str, str]:
    """Return the text of each tokenizer file in `directory`; empty when it has no tokenizer.

    Raises:
        ConfigInvalid: A file is unreadable, too large or not UTF-8.
    """
    if not (directory / "tokenizer.json").is_file():
        return {}
    paths = [directory / name for name in TOKENIZER_FILE_NAMES]
    return {path.name: _read(path) for path in paths if path.is_file()}


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        _check_size(path.name, len(data))
        if data.startswith(_LFS_POINTER):
            raise ConfigInvalid(
                f"in {path.parent} git has put a Git LFS pointer in place of {path.name}: run `git lfs pull` there"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read as text: {error}") from error


def _check_size(name: str, size_bytes: int) -> None:
    if size_bytes > MAX_FILE_BYTES:
        raise ConfigInvalid(f"{name} has {size_bytes} bytes; at most {MAX_FILE_BYTES} are taken")


def tokenizer_hash(files: Mapping[str, str]) -> str:
    """Return a name for exactly these files, in hexadecimal; empty for no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def write_tokenizer_files(files: Mapping[str, str], cache_dir: Path) -> Path:
    """Keep a peer's tokenizer files in a folder of `cache_dir` named by their hash; return it.

    The folder appears whole or not at all, also when several processes write it at once.

    Raises:
        ConfigInvalid: A name is not one of `TOKENIZER_FILE_NAMES`, a file is too large, or there
            is no tokenizer.json.
    """
    if unknown := set(files) - set(TOKENIZER_FILE_NAMES):
        raise ConfigInvalid(f"not the name of a tokenizer file: {min(unknown)!r}")
    if "tokenizer.json" not in files:
        raise ConfigInvalid("these tokenizer files have no tokenizer.json")
    for name, text in files.items():
        _check_size(name, len(text.encode()))
    final = cache_dir / tokenizer_hash(files)
    if not final.is_dir():
        _write_whole(files, final)
    return final


def _write_whole(files: Mapping[str, str], final: Path) -> None:
    partial = final.with_name(f"{final.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    for name, text in files.items():
        (partial / name).write_bytes(text.encode())
    try:
        os.replace(partial, final)
    except OSError:
        # Another process was first; its folder holds the same bytes.
        if not final.is_dir():
            raise
        for path in partial.iterdir():
            path.unlink()
        partial.rmdir()
