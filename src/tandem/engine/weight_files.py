"""The weight files of a model: finds them, checks that they are complete, and samples them.

This module imports neither torch nor transformers, because a node checks its files before it starts the process that
loads them. `checkpoint.py` checks whether the tensors fit the model.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.wire.errors import ConfigInvalid

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The order in which transformers looks for files. An index lists the files to load.
_NAMES = (
    WEIGHTS,
    INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Bytes sampled at each end of each tensor. This distinguishes fine-tunes, whichever tensors were trained, without
# reading hundreds of gigabytes at the start: a 70B model has 723 tensors, so 12 MiB are read.
_SAMPLE_BYTES = 8 << 10
_DIRECTORY_BYTES = 1 << 20
_NUM_SAMPLES = 1024
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
# Start of a Git LFS pointer, which git checks out in place of a file that it did not fetch.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def weight_files(path: Path) -> list[Path]:
    """Return the files of a directory from which transformers loads weights; empty if there are none.

    Raises:
        ConfigInvalid: An index is invalid or lists missing files.
    """
    own = read_object(path / "config.json").get("transformers_weights")
    names = _NAMES if own is None else (str(own),)
    first = next((path / name for name in names if (path / name).is_file()), None)
    if first is None:
        return []
    return _files_of_index(first) if first.suffix == ".json" else [first]


def check_weights(path: Path) -> None:
    """Raise ConfigInvalid if a directory has no weights, or a weight file is truncated or an LFS pointer."""
    files = weight_files(path)
    if not files:
        raise ConfigInvalid(
            f"{path} has no weights (model.safetensors, or shards and model.safetensors.index.json): copy "
            "them there, or use --load-format dummy for random weights"
        )
    check_no_pointers(files)
    facts = read_object(path / "config.json")
    settings = [facts, facts.get("text_config")]
    is_packed = any(isinstance(each, dict) and each.get("quantization_config") for each in settings)
    for file in files:
        if file.suffix == ".safetensors":
            tensors = _tensors(file)
            if not is_packed:
                _refuse_packed(tensors, path)
        elif file.stat().st_size == 0:
            raise ConfigInvalid(f"{file} is empty: copy it again")


def _refuse_packed(tensors: Mapping[str, Any], path: Path) -> None:
    """Reject quantized weights without a quantization_config, which would be loaded as plain numbers."""
    packed = [
        f"{name} ({tensor['dtype']})"
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor["dtype"] not in _PLAIN_DTYPES
    ]
    if packed:
        raise ConfigInvalid(
            f"the weights in {path} are quantized ({some(packed)}), but its config.json has no quantization_config: "
            "copy the config.json of these weights"
        )


def check_no_pointers(files: list[Path]) -> None:
    """Raise ConfigInvalid if one of these files is a Git LFS pointer."""
    pointers = [file.name for file in files if _is_pointer(file)]
    if pointers:
        raise ConfigInvalid(
            f"{files[0].parent} has Git LFS pointers instead of files ({some(pointers)}): run `git lfs pull` there"
        )


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ConfigInvalid if the file contains anything else."""
    try:
        check_no_pointers([file])
        read = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{file} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigInvalid(f"{file} contains a JSON {type(read).__name__} instead of an object")
    return read


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory's safetensors files; empty if there are none.

    Raises:
        ConfigInvalid: A weight file has a different format, or is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            raise ConfigInvalid(
                f"{file} is not a safetensors file: save the weights as safetensors"
            )
        shapes |= {name: tuple(tensor["shape"]) for name, tensor in _tensors(file).items()}
    return shapes


def weight_samples(path: Path) -> Iterator[bytes]:
    """Yield samples that identify the weights of a directory, or of one file such as a GGUF.

    Of a directory: file names, sizes, headers, and both ends of each tensor.
    """
    if path.is_file():
        yield from _spread_samples(path)
        return
    for file in weight_files(path) or sorted(path.glob("*.safetensors")):
        yield f"{file.name} {file.stat().st_size}".encode()
        yield from _samples_of(file)


def _files_of_index(index: Path) -> list[Path]:
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ConfigInvalid(f"{index} has no weight_map from tensors to files: copy it again")
    files = [index.parent / name for name in sorted(set(shards.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ConfigInvalid(
            f"{index.parent} lacks {len(absent)} of the {len(files)} weight files that {index.name} lists "
            f"({some(absent)}): copy them there"
        )
    return files


def _samples_of(file: Path) -> Iterator[bytes]:
    """Yield the header and both ends of each tensor of a safetensors file; for other formats, parts or all of the file."""
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            tensors = _tensors(file)
            begins_at = 8 + int.from_bytes(opened.read(8), "little")
            yield opened.read(begins_at - 8)
            for begin, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
                size = min(end - begin, _SAMPLE_BYTES)
                for first in (begin, end - size):
                    opened.seek(begins_at + first)
                    yield opened.read(size)
            return
        if zipfile.is_zipfile(file):  # the directory at its end has checksums of all tensors
            opened.seek(max(0, file.stat().st_size - _DIRECTORY_BYTES))
        while part := opened.read(_DIRECTORY_BYTES):  # a plain pickle is read completely
            yield part


def _spread_samples(file: Path) -> Iterator[bytes]:
    """Yield a file's size, and `_NUM_SAMPLES` samples at equal distances."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as opened:
        for begin in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
            opened.seek(begin)
            yield opened.read(_SAMPLE_BYTES)


def _tensors(file: Path) -> dict[str, Any]:
    """Return the header entries of a safetensors file by tensor. Raise ConfigInvalid if it is invalid or truncated."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            # The length is bounded by the file's size, because a file of a different format may start with any number.
            tensors: dict[str, Any] = json.loads(opened.read(min(length, size)))
            tensors.pop("__metadata__", None)
            ends_at = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigInvalid(
                f"{file} is not a safetensors file, or its header is damaged: copy it again"
            ) from error
    if size != 8 + length + ends_at:
        raise ConfigInvalid(
            f"{file} has {size} bytes instead of {8 + length + ends_at}: the copy is incomplete; copy it again"
        )
    return tensors


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def some(names: list[str]) -> str:
    """Return the first three names, joined by commas, with "and others" if there are more."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
