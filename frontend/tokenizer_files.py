"""The files of a tokenizer, as a node serves them to a router without a model, and their hash."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tandem.wire.errors import ConfigInvalid

# Only these names are ever read.
TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# The beginning of what git checks out in place of a file that it did not fetch.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Gemma 3's tokenizer.json, among the largest published, is 33 MB.
MAX_FILE_BYTES = 64 * 1024 * 1024


def tokenizer_files(directory: Path) -> dict[str, str]:
    """Return the text of each tokenizer file in `directory`, or nothing if it has no tokenizer."""
    if not (directory / "tokenizer.json").is_file():
        return {}
    paths = [directory / name for name in TOKENIZER_FILE_NAMES]
    return {path.name: _read(path) for path in paths if path.is_file()}


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise ConfigInvalid(
                f"{path.name} has {len(data)} bytes; at most {MAX_FILE_BYTES} are taken"
            )
        if data.startswith(_LFS_POINTER):
            raise ConfigInvalid(
                f"in {path.parent} git has put a Git LFS pointer in place of {path.name}: run `git lfs pull` there"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read as text: {error}") from error


def tokenizer_hash(files: Mapping[str, str]) -> str:
    """Return the hash of these files, in hexadecimal; empty for no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
