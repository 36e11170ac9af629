"""Downloads a model by its name on the Hugging Face Hub into the hub's local cache.

The library `huggingface_hub` has the cache, its locks between processes, retries, and the variables of the
environment: `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. This module chooses the files that serving needs, and
words progress and errors for operators.

`python -m tandem.node.hub MODEL` downloads in a separate process, because the library's threads would delay the end of
a process until each has its file. It writes reports to standard output, one JSON object a line.
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
from tandem.frontend.tokenizer import TOKENIZER_FILE_NAMES
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, TandemError

log = get_logger(__name__)

NO_MODEL = "troubleshooting#no-such-model"  # section of the documentation

# A relative path looks alike, so paths that exist win. `org/name/file.gguf`, which vLLM takes, is always a path.
_NAME = re.compile(
    r"(?P<repo>[a-z0-9][\w.-]*/[\w.-]+)(:(?P<gguf>[\w.-]+))?(@(?P<revision>[\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)
# The adapter's file, too: with it the refusal of an adapter names it as one.
_SMALL = ("config.json", GENERATION_CONFIG, "adapter_config.json", INDEX, *TOKENIZER_FILE_NAMES)
_REPORT_S = 10.0
_MB = 1_000_000


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the hub, and which of its files are wanted.

    Attributes:
        gguf: A GGUF file's name, or the quantization at the end of its name; empty: safetensors if there are any.
        has_weights: Whether weights are wanted.
        has_code: Whether Python files are wanted.
    """

    repo: str
    gguf: str = ""
    revision: str = "main"
    has_weights: bool = True
    has_code: bool = False

    @property
    def name(self) -> str:
        """The name for clients, as in vLLM and SGLang."""
        return f"{self.repo}:{self.gguf}" if self.gguf else self.repo


def hub_model(model: str) -> HubModel | None:
    """Return the model that a name `org/name[:GGUF][@revision]` means, or None: it is a path."""
    found = _NAME.fullmatch(model)
    if found is None or found["repo"].endswith(".gguf") or Path(model).exists():
        return None
    return HubModel(
        repo=found["repo"], gguf=found["gguf"] or "", revision=found["revision"] or "main"
    )


# ── reports of the process that downloads ────────────────────────────────────────────────────────


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights that arrived so far, of those that were absent."""

    done_bytes: int
    total_bytes: int


class Found(msgspec.Struct, frozen=True, tag=True):
    """The path of a directory or a GGUF file in the cache, and the commit that it belongs to."""

    path: str
    commit: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The reason why there is no model, for operators."""

    reason: str


Report = Progress | Found | Failed


def download(model: HubModel) -> Path:
    """Return the directory or the GGUF file of a model in the hub's cache, after downloading what is absent.

    Raises:
        ConfigInvalid: It cannot be downloaded; the message says what to do.
    """
    command = (sys.executable, "-P", "-m", "tandem.node.hub", msgspec.json.encode(model).decode())
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own module
        assert process.stdout is not None
        try:
            last = _last_report(model, process.stdout)
        except BaseException:
            process.terminate()
            raise
    if isinstance(last, Found):
        log.info("model.resolved", model=model.name, revision=model.revision, commit=last.commit)
        return Path(last.path)
    ended = f"the download of {model.repo} ended with status {process.returncode}"
    raise ConfigInvalid(ended if last is None else last.reason, topic=NO_MODEL)


def _last_report(model: HubModel, reports: Iterable[bytes]) -> Found | Failed | None:
    for line in reports:
        report: Report = msgspec.json.decode(line, type=Report)
        if not isinstance(report, Progress):
            return report
        _log_progress(model, report)
    return None


def _log_progress(model: HubModel, progress: Progress) -> None:
    if not sys.stderr.isatty():  # a terminal shows the library's progress bars
        log.info(
            "model.downloading",
            model=model.name,
            percent=100 * progress.done_bytes // progress.total_bytes,
            total_mb=progress.total_bytes // _MB,
        )


# ── in a process of its own ──────────────────────────────────────────────────────────────────────


def fetch(model: HubModel, report: Callable[[Report], None]) -> Found:
    """Download the absent files of a model, of one commit.

    Raises:
        ConfigInvalid: The repository has no files that can be served.
        Exception: Anything that the library raises.
    """
    from huggingface_hub import snapshot_download, utils

    # Only weights take long. The library would warn of a repository of GGUF files, which has no small files.
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    small = [*_SMALL, *(["*.py"] if model.has_code else [])]
    folder = Path(
        snapshot_download(
            model.repo, revision=model.revision, allow_patterns=small, ignore_patterns="*/*"
        )
    )
    sizes = _sizes(model, folder)
    names = _wanted(model, folder, sizes)
    absent = sum(sizes[name] for name in names if not (folder / name).exists())
    if names:
        utils.logging.set_verbosity_warning()
        if absent and sys.stderr.isatty():
            utils.enable_progress_bars()
        with _reported(absent, folder.parents[1] / "blobs", report):
            snapshot_download(model.repo, revision=folder.name, allow_patterns=names)
    gguf = [folder / name for name in names if name.endswith(".gguf")]
    return Found(str(gguf[0] if gguf else folder), folder.name)


def _sizes(model: HubModel, folder: Path) -> dict[str, int]:
    """Return the sizes of the commit's files at the top by name; of files in the cache, 0, if none are known."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(model.repo, revision=folder.name)
    except CachedRepoTreeNotFoundError:  # offline, with a cache that an earlier library made
        return {path.name: 0 for path in folder.iterdir()}
    return {file.path: file.size for file in files if "/" not in file.path}


def _wanted(model: HubModel, folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the files of weights: one GGUF file, or what transformers loads."""
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
            f"{model.repo} has its weights as pickles (.bin, .pt), which may run code and are not downloaded: name a "
            "repository with safetensors, or download them yourself and give the directory"
        )
    if not files:
        wanted = "GGUF file" if model.gguf else f"{WEIGHTS}, {INDEX} or GGUF file"
        raise ConfigInvalid(f"{model.repo} has no {wanted} at its top: name another repository")
    ending = re.escape(model.gguf.lower().removesuffix(".gguf"))
    fitting = [name for name in files if re.search(rf"(^|[-._]){ending}\.gguf$", name.lower())]
    found = fitting if model.gguf else files
    if len(found) == 1:
        return found[0]
    raise ConfigInvalid(
        f"{model.repo} has {len(files)} GGUF files, of which {len(found)} fit {model.name}: name one, such as "
        f"{some([f'{model.repo}:{name}' for name in found or files])}"
    )


@contextlib.contextmanager
def _reported(total_bytes: int, blobs: Path, report: Callable[[Report], None]) -> Iterator[None]:
    """Report progress by what the cache grows, because another node may be downloading the same files."""
    if not total_bytes:
        yield
        return
    before, ended = _used_bytes(blobs), threading.Event()

    def report_often() -> None:
        while not ended.wait(_REPORT_S):
            done_bytes = min(_used_bytes(blobs) - before, total_bytes)
            try:
                report(Progress(max(0, done_bytes), total_bytes))
            except OSError:  # the node that wants the model was killed
                _stop()

    report(Progress(0, total_bytes))
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
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted meanwhile
            used += file.stat().st_blocks * 512
    return used


def _stop(*_signal: object) -> NoReturn:
    """End this process without its partial files, which no later download would use."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.endswith(".incomplete"):
                os.unlink(path)
    os._exit(1)


def reason_of(error: BaseException, model: HubModel) -> str:
    """Return a sentence for operators about an error of the library: what to do."""
    from huggingface_hub import constants, errors

    cache, repo = constants.HF_HUB_CACHE, model.repo
    hub = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)  # a mirror's password stays out of logs
    lacks = f"the cache {cache} lacks files of {repo}"
    space = f"no space is left in {cache} for {repo}: free some, or set HF_HOME to a directory with more"
    rights = (
        f"{cache} cannot be written to: correct its rights, or set HF_HOME to another directory"
    )
    numbers = {errno.ENOSPC: space, errno.EDQUOT: space, errno.EACCES: rights, errno.EROFS: rights}
    kinds = {
        errors.GatedRepoError: f"{repo} is gated: accept its licence at {hub}/{repo}, and set HF_TOKEN to a token of "
        "the account that accepted it",
        errors.RevisionNotFoundError: f"{repo} has no revision {model.revision} at {hub}: give one of its branches, "
        "tags or commits after the @",
        errors.RepositoryNotFoundError: f"{repo} is no path on this machine, and no model at {hub} that anyone may "
        "read: correct the name, or set HF_TOKEN if it is private",
        errors.HFValidationError: f"{repo} is no path on this machine, and no name of a model: {error}",
        errors.OfflineModeIsEnabled: f"{lacks} at {model.revision}, and HF_HUB_OFFLINE is set: unset it, or give a "
        "local directory",
    }
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for each in causes:
        if (told := next((kinds[kind] for kind in kinds if isinstance(each, kind)), "")) != "":
            return told
        if isinstance(each, errors.HfHubHTTPError):
            status = each.response.status_code
            advice = "check HF_TOKEN" if status in (401, 403) else "try again later"
            return f"{hub} answers with status {status} for {repo}: {advice}"
        if isinstance(each, OSError) and each.errno in numbers:
            return numbers[each.errno]
    told = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split())
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{hub} cannot be reached ({told}), and {lacks}: check the network, set HF_ENDPOINT to a mirror, or give a "
            "local directory"
        )
    return f"cannot download {repo} from {hub} ({told}): start again, which keeps complete files"


def main(order: str) -> int:
    """Download a model; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    model = msgspec.json.decode(order, type=HubModel)

    def report(message: Report) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    try:
        report(fetch(model, report))
    except TandemError as error:
        report(Failed(error.message))
    except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds
        report(Failed(reason_of(error, model)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
