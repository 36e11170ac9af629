"""Downloads a model by its name on the Hugging Face Hub into the hub's local cache.

The library `huggingface_hub` provides the cache, its locks between processes, retries, and the environment variables
`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`. This module selects the files that serving needs, and reports
progress and errors to operators.

`python -m tandem.node.models.hub MODEL` downloads in a separate process, because a process cannot exit until each of
the library's threads has its file. It writes reports to standard output, one JSON object per line.
"""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.engine.shape import GENERATION_CONFIG
from tandem.engine.weight_files import INDEX, WEIGHTS, read_object, some
from tandem.frontend.text.tokenizer_files import MORE_TEMPLATES, TOKENIZER_FILE_NAMES
from tandem.telemetry.log import MODEL_DOWNLOADING, MODEL_RESOLVED, get_logger
from tandem.wire.errors import ConfigInvalid, TandemError

log = get_logger(__name__)

NO_MODEL = "docs/troubleshooting.md#no-such-model"  # section of the documentation

# Relative paths have the same form, so existing paths take precedence. `org/name/file.gguf` (vLLM) is always a path.
_NAME = re.compile(
    r"(?P<repo>[a-z0-9][\w.-]*/[\w.-]+)(:(?P<gguf>[\w.-]+))?(@(?P<revision>[\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)
# Includes the adapter's file, so that an adapter is rejected as such.
_SMALL = (
    *("config.json", GENERATION_CONFIG, "adapter_config.json", INDEX),
    *(*TOKENIZER_FILE_NAMES, MORE_TEMPLATES),
)
# End of the stem of a file that llama-gguf-split wrote, with the number of parts.
_PART = re.compile(r"-\d{5}-of-(\d{5})")
_REPORT_S = 10.0
_MB = 1_000_000


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the hub, and the kinds of files to download.

    Attributes:
        gguf: Name of a GGUF file, or the quantization at the end of its name; empty: safetensors if there are any.
        has_weights: Whether to download weights.
        has_code: Whether to download Python files.
    """

    repo: str
    gguf: str = ""
    revision: str = "main"
    has_weights: bool = True
    has_code: bool = False

    @property
    def name(self) -> str:
        """Name for clients, as in vLLM and SGLang."""
        return f"{self.repo}:{self.gguf}" if self.gguf else self.repo


def hub_model(model: str) -> HubModel | None:
    """Parse a name `org/name[:GGUF][@revision]`; None if it is a path."""
    found = _NAME.fullmatch(model)
    if found is None or found["repo"].endswith(".gguf") or Path(model).exists():
        return None
    return HubModel(
        repo=found["repo"], gguf=found["gguf"] or "", revision=found["revision"] or "main"
    )


def refuse_part(path: str) -> None:
    """Raise ConfigInvalid if a GGUF file has the name of one of several parts of a model."""
    part = _PART.search(Path(path).name)
    if part and int(part[1]) > 1:
        whole = _PART.sub("", Path(path).name)
        raise ConfigInvalid(
            f"{path} is one of several parts of a model: download all, join them with llama-gguf-split --merge "
            f"{Path(path).name} {whole}, and pass {whole}"
        )


# ── reports of the downloading process ───────────────────────────────────────────────────────────


class DownloadProgress(msgspec.Struct, frozen=True, tag=True):
    """Downloaded bytes of weights, and the total to download."""

    done_bytes: int
    total_bytes: int


class ModelFound(msgspec.Struct, frozen=True, tag=True):
    """The path of a directory or GGUF file in the cache, and its commit."""

    path: str
    commit: str


class DownloadFailed(msgspec.Struct, frozen=True, tag=True):
    """The reason of a failed download, for operators."""

    reason: str


DownloadReport = DownloadProgress | ModelFound | DownloadFailed


def download(model: HubModel) -> Path:
    """Return the directory or GGUF file of a model in the hub's cache. Download missing files.

    Raises:
        ConfigInvalid: The model cannot be downloaded; the message says what to do.
    """
    command = (
        sys.executable,
        "-P",
        "-m",
        "tandem.node.models.hub",
        msgspec.json.encode(model).decode(),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own module
        assert process.stdout is not None
        try:
            last = _last_report(model, process.stdout)
        except BaseException:
            process.terminate()
            raise
    if isinstance(last, ModelFound):
        log.info(MODEL_RESOLVED, model=model.name, revision=model.revision, commit=last.commit)
        return Path(last.path)
    unknown = f"the download of {model.repo} exited with status {process.returncode}"
    raise ConfigInvalid(unknown if last is None else last.reason, topic=NO_MODEL)


def _last_report(model: HubModel, reports: Iterable[bytes]) -> ModelFound | DownloadFailed | None:
    for line in reports:
        report: DownloadReport = msgspec.json.decode(line, type=DownloadReport)
        if not isinstance(report, DownloadProgress):
            return report
        _log_progress(model, report)
    return None


def _log_progress(model: HubModel, progress: DownloadProgress) -> None:
    if not sys.stderr.isatty():  # on a terminal the library shows progress bars
        log.info(
            MODEL_DOWNLOADING,
            model=model.name,
            percent=100 * progress.done_bytes // progress.total_bytes,
            total_mb=progress.total_bytes // _MB,
        )


# ── in the separate process ──────────────────────────────────────────────────────────────────────


def fetch(model: HubModel, report: Callable[[DownloadReport], None]) -> ModelFound:
    """Download the missing files of a model, all of one commit.

    Raises:
        ConfigInvalid: The repository has no files that can be served.
        Exception: Any error of the library.
    """
    from huggingface_hub import snapshot_download, utils

    # Show no progress for small files. The library would also warn that a GGUF repository has none of them.
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    small = [*_SMALL, *(["*.py"] if model.has_code else [])]
    folder = Path(
        snapshot_download(
            model.repo, revision=model.revision, allow_patterns=small, ignore_patterns="*/*.py"
        )
    )
    sizes = _sizes(model, folder)
    names = _weight_names(model, folder, sizes)
    absent = sum(sizes[name] for name in names if not (folder / name).exists())
    if names:
        utils.logging.set_verbosity_warning()
        if absent and sys.stderr.isatty():
            utils.enable_progress_bars()
        with _reported(absent, folder.parents[1] / "blobs", report):
            snapshot_download(model.repo, revision=folder.name, allow_patterns=names)
    gguf = [folder / name for name in names if name.endswith(".gguf")]
    return ModelFound(str(gguf[0] if gguf else folder), folder.name)


def _sizes(model: HubModel, folder: Path) -> dict[str, int]:
    """Return the sizes of the commit's top-level files by name; 0 for each cached file if sizes are unknown."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(model.repo, revision=folder.name)
    except CachedRepoTreeNotFoundError:  # offline, with a cache of an older library
        return {path.name: 0 for path in folder.iterdir()}
    return {file.path: file.size for file in files if "/" not in file.path}


def _weight_names(model: HubModel, folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the weight files: one GGUF file, or the files that transformers loads."""
    if model.gguf:
        return [_gguf_file(model, names)]
    if not model.has_weights or "adapter_config.json" in names:
        return []
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        shards = read_object(folder / INDEX).get("weight_map")
        listed = set(shards.values()) if isinstance(shards, dict) else set()
        return sorted(listed & set(names))  # `check_weights` reports what is missing
    return [_gguf_file(model, names)]


def _gguf_file(model: HubModel, names: Collection[str]) -> str:
    files = sorted(name for name in names if name.endswith(".gguf"))
    if not files and any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ConfigInvalid(
            f"{model.repo} has only pickled weights (.bin, .pt), which can run code and are not downloaded; use a "
            "repository with safetensors, or download the weights yourself and pass the directory"
        )
    if not files:
        missing = "GGUF file" if model.gguf else f"{WEIGHTS}, {INDEX} or GGUF file"
        raise ConfigInvalid(
            f"{model.repo} has no {missing} at its top level; use a different repository"
        )
    ending = re.escape(model.gguf.lower().removesuffix(".gguf"))
    own = re.compile(rf"(^|[-._]){ending}({_PART.pattern})?\.gguf$")
    fitting = [name for name in files if own.search(name.lower())]
    found = fitting if model.gguf else files
    if len({_PART.sub("", name) for name in found}) == 1:
        refuse_part(f"{model.repo}/{found[0]}")
    if len(found) == 1:
        return found[0]
    raise ConfigInvalid(
        f"{len(found)} of the {len(files)} GGUF files of {model.repo} match {model.name}; name one, such as "
        f"{some([f'{model.repo}:{name}' for name in found or files])}"
    )


@contextlib.contextmanager
def _reported(
    total_bytes: int, blobs: Path, report: Callable[[DownloadReport], None]
) -> Iterator[None]:
    """Report progress by the growth of the cache, because a different node may be downloading the same files."""
    if not total_bytes:
        yield
        return
    before, ended = _used_bytes(blobs), threading.Event()

    def report_often() -> None:
        while not ended.wait(_REPORT_S):
            done_bytes = min(_used_bytes(blobs) - before, total_bytes)
            try:
                report(DownloadProgress(max(0, done_bytes), total_bytes))
            except OSError:  # the node that started this download was killed
                _stop()

    report(DownloadProgress(0, total_bytes))
    thread = threading.Thread(target=report_often, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _used_bytes(folder: Path) -> int:
    used = 0
    for file in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted in the meantime
            used += file.stat().st_blocks * 512
    return used


def _stop(*_signal: object) -> NoReturn:
    """Exit and delete partial files, which no later download would use."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.endswith(".incomplete"):
                os.unlink(path)
    os._exit(1)


def reason_of(error: BaseException, model: HubModel) -> str:
    """Describe an error of the library to operators, and say what to do."""
    from huggingface_hub import constants, errors

    cache, repo = constants.HF_HUB_CACHE, model.repo
    hub = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)  # keep a mirror's password out of logs
    lacks = f"the cache {cache} lacks files of {repo}"
    space = (
        f"no space left in {cache} for {repo}; free some, or set HF_HOME to a directory with more"
    )
    rights = (
        f"{cache} is not writable; correct its permissions, or set HF_HOME to a different directory"
    )
    numbers = {errno.ENOSPC: space, errno.EDQUOT: space, errno.EACCES: rights, errno.EROFS: rights}
    kinds = {
        errors.GatedRepoError: f"{repo} is gated; accept its licence at {hub}/{repo}, and set HF_TOKEN to a token of "
        "the account that accepted it",
        errors.RevisionNotFoundError: f"{repo} has no revision {model.revision} at {hub}; use one of its branches, "
        "tags or commits after the @",
        errors.RepositoryNotFoundError: f"{repo} is neither a path on this machine nor a public model at {hub}; "
        "correct the name, or set HF_TOKEN if the model is private",
        errors.HFValidationError: f"{repo} is neither a path on this machine nor a valid model name: {error}",
        errors.OfflineModeIsEnabled: f"{lacks} at {model.revision}, and HF_HUB_OFFLINE is set; unset it, or pass a "
        "local directory",
    }
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for each in causes:
        if (reason := next((kinds[kind] for kind in kinds if isinstance(each, kind)), "")) != "":
            return reason
        if isinstance(each, errors.HfHubHTTPError):
            status = each.response.status_code
            advice = "check HF_TOKEN" if status in (401, 403) else "try again later"
            return f"{hub} answers with status {status} for {repo}; {advice}"
        if isinstance(each, OSError) and each.errno in numbers:
            return numbers[each.errno]
    cause_text = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split())
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{hub} cannot be reached ({cause_text}), and {lacks}; check the network, set HF_ENDPOINT to a mirror, or "
            "pass a local directory"
        )
    return (
        f"cannot download {repo} from {hub} ({cause_text}); start again, which keeps complete files"
    )


def main(order: str) -> int:
    """Download a model; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    model = msgspec.json.decode(order, type=HubModel)

    def report(message: DownloadReport) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    try:
        report(fetch(model, report))
    except TandemError as error:
        report(DownloadFailed(error.message))
    except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds
        report(DownloadFailed(reason_of(error, model)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
