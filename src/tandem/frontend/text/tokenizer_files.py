"""Reads the tokenizer of a model directory, as the installed transformers loads it.

Up to nine files describe a tokenizer. How they combine depends on the tokenizer's class, the model's type and the
release of transformers: some classes rebuild the pre-tokenizer, and flags such as `add_bos_token` may have no effect.
Therefore `AutoTokenizer` combines them, once per machine, and only the result is used and sent to routers: a
`tokenizer.json`, and a `tokenizer_config.json` with the special tokens and the templates of chats and replies.

Edge workers do not import `AutoTokenizer`, because it imports torch if that is installed: 3 s and 240 MB per process, or
1.1 s and 43 MB without torch. Routers may also be installed without transformers.

`python -P -m tandem.frontend.text.tokenizer_files DIRECTORY [trust-remote-code]` reads one in a separate process. It
writes the files to standard output as a JSON object. If it fails, the last line of its standard error is the reason.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import tokenizers

from tandem.wire.errors import ConfigInvalid

TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Pattern of the files with further chat templates, such as `tool_use`.
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
# The first bytes of the pointer that git checks out if an LFS file was not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Gemma 3's tokenizer.json, among the largest published, is 33 MB.
MAX_FILE_BYTES = 64 * 1024 * 1024
_TRUST = "trust-remote-code"
_DECODER = msgspec.json.Decoder(dict[str, str])


def tokenizer_files(
    directory: Path, *, trusts_code: bool = False, cache: Path | None = None
) -> dict[str, str]:
    """Return the files of the tokenizer in `directory`, by name. Empty: it has no tokenizer.

    Takes one to four seconds without the cache.

    Args:
        trusts_code: Whether the directory's Python files may run. Their results are not cached.
        cache: Directory that keeps results for the next start, and for other nodes of this machine.

    Raises:
        ConfigInvalid: The tokenizer cannot be loaded; the message says what to do.
    """
    if not (directory / "tokenizer.json").is_file():
        return {}
    for path in [directory / name for name in TOKENIZER_FILE_NAMES]:
        _check_file(path)
    if cache is not None and not trusts_code:
        # The cache cannot be written, its file is damaged, or a file of the tokenizer cannot be read.
        with suppress(OSError, msgspec.DecodeError):
            return _DECODER.decode(_combine_once(directory, cache))
    return _DECODER.decode(_combine_apart(directory, trusts_code=trusts_code))


def _combine_once(directory: Path, cache: Path) -> bytes:
    """Return what `_combine_apart` returned before for equal files, or keep its result."""
    path = cache / f"{_digest(directory)}.json"
    cache.mkdir(parents=True, exist_ok=True)
    # The nodes of a machine start together: the first combines, and the others read its result.
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return path.read_bytes()
        combined = _combine_apart(directory, trusts_code=False)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            written = Path(scratch) / path.name
            written.write_bytes(combined)
            written.rename(path)  # so that no node reads a part
    return combined


def _digest(directory: Path) -> str:
    """Return a name for all that the result depends on: files, releases of libraries, and this module."""
    small = [
        each
        for each in sorted([*directory.iterdir(), *directory.glob(MORE_TEMPLATES), Path(__file__)])
        if each.suffix != ".safetensors"
        and each.is_file()
        and each.stat().st_size <= MAX_FILE_BYTES
    ]
    facts = [each.name.encode() + hashlib.sha256(each.read_bytes()).digest() for each in small]
    with suppress(ImportError):  # without transformers, combining fails with a reason
        facts += [
            importlib.metadata.version(each).encode() for each in ("transformers", "tokenizers")
        ]
    return hashlib.sha256(b"/".join(facts)).hexdigest()[:32]


def _combine_apart(directory: Path, *, trusts_code: bool) -> bytes:
    """Run `combine` in a separate process; return its files as a JSON object."""
    command = [sys.executable, "-P", "-m", "tandem.frontend.text.tokenizer_files", str(directory)]
    done = subprocess.run(  # noqa: S603 - our own module, arguments as a list
        command + [_TRUST] * trusts_code,
        check=False,
        capture_output=True,
        process_group=0,  # Ctrl-C reaches only the caller, which then ends in its own way
    )
    if done.returncode == 1:
        raise ConfigInvalid(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    if done.returncode:
        raise ConfigInvalid(
            f"reading the tokenizer in {directory} ended with status {done.returncode}"
        )
    return done.stdout


def _check_file(path: Path) -> None:
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}") from error
    if start == _LFS_POINTER:
        raise ConfigInvalid(
            f"{path} is a Git LFS pointer instead of the file: run `git lfs pull` in {path.parent}"
        )
    if (size_bytes := path.stat().st_size) > MAX_FILE_BYTES:
        raise ConfigInvalid(
            f"{path.name} has {size_bytes} bytes; at most {MAX_FILE_BYTES} are supported"
        )


# ── in the separate process ──────────────────────────────────────────────────────────────────────


def combine(directory: Path, *, trusts_code: bool) -> dict[str, str]:
    """Load a tokenizer with transformers and return its files by name.

    Raises:
        ConfigInvalid: The tokenizer cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trusts_code
        )
    except Exception as error:  # transformers and tokenizers raise any
        if not isinstance(error, ImportError):
            _check_backend(directory / "tokenizer.json")  # its reason is clearer
        raise ConfigInvalid(
            f"the tokenizer in {directory} cannot be loaded: {_reason(error)}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigInvalid(
            f"the tokenizer in {directory} cannot be loaded: {type(tokenizer).__name__} has no fast version"
        )
    config = {
        **tokenizer.special_tokens_map,
        "chat_template": _templates(tokenizer.chat_template, directory / "chat_template.json"),
        "response_template": getattr(tokenizer, "response_template", None),
        "split_special_tokens": tokenizer.split_special_tokens,
        # transformers ignores the flag for BPE, whose spaces are the model's.
        "clean_up_decoded": tokenizer.clean_up_tokenization_spaces
        and type(backend.model).__name__ != "BPE",
    }
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


def _check_backend(path: Path) -> None:
    try:
        tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigInvalid(
            f"the tokenizer in {path.parent} cannot be loaded: {path.name} is broken: {error}; copy it from the model"
        ) from error


def _templates(found: str | Mapping[str, str] | None, processor_file: Path) -> object:
    """Return one template, or a list of named ones. Multimodal models may have theirs in the file of the processor."""
    if found is None and processor_file.is_file():
        return json.loads(processor_file.read_text(encoding="utf-8")).get("chat_template")
    if found is None or isinstance(found, str):
        return found
    return [{"name": name, "template": text} for name, text in found.items()]


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    match error:
        case ImportError(name="transformers"):
            return "this needs transformers: pip install 'tandem-serve[parsers]'"
        case ValueError() if "trust_remote_code" in text:
            return (
                "it is a Python class in this directory; if you trust it, set --trust-remote-code"
            )
    return f"{type(error).__name__}: {text}; copy all of its files from the same model"


def main(directory: str, *trust: str) -> int:
    """Write the files of a tokenizer to standard output; return the exit status."""
    # Importing torch would take two more seconds. mistral_common would replace tokenizer.json by a format that is not
    # served.
    for name in ("torch", "mistral_common"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: the import fails
    try:
        files = combine(Path(directory), trusts_code=_TRUST in trust)
    except ConfigInvalid as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(files))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
