"""The files of a model's weights: finds them, checks that they are complete, and samples them.

It imports neither torch nor transformers, because a node checks its files before it starts the process that
loads them. `checkpoint.py` checks whether the tensors belong to the model.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.wire.errors import ConfigInvalid

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# In the order in which transformers looks for them. An index lists the files to load.
_NAMES = (
    WEIGHTS,
    INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Bytes sampled at each end of each tensor. Enough to tell fine-tunes apart, whichever tensors were trained,
# without reading hundreds of gigabytes at start: a 70B model has 723 tensors, so 12 MiB.
_SAMPLE_BYTES = 8 << 10
_DIRECTORY_BYTES = 1 << 20
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
# Beginning of a Git LFS pointer, which git checks out in place of a file that it did not fetch.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def weight_files(path: Path) -> list[Path]:
    """Return the files in a directory that transformers loads weights from; empty if there are none.

    Raises:
        ConfigInvalid: An index is invalid, or lists missing files.
    """
    own = read_object(path / "config.json").get("transformers_weights")
    names = _NAMES if own is None else (str(own),)
    first = next((path / name for name in names if (path / name).is_file()), None)
    if first is None:
        return []
    return _files_of_index(first) if first.suffix == ".json" else [first]


def check_weights(path: Path) -> None:
    """Raise ConfigInvalid if a directory has no weights, or a file of them is an LFS pointer or truncated."""
    files = weight_files(path)
    if not files:
        raise ConfigInvalid(
            f"{path} has no weights (model.safetensors, or shards and model.safetensors.index.json): copy "
            "them there, or give --load-format dummy for random ones"
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
    """Reject quantized weights without a quantization_config: they would be loaded as plain numbers."""
    packed = [
        f"{name} ({tensor['dtype']})"
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor["dtype"] not in _PLAIN_DTYPES
    ]
    if packed:
        raise ConfigInvalid(
            f"the weights in {path} are quantized ({some(packed)}), and its config.json has no quantization_config: "
            "copy the config.json that belongs to them"
        )


def check_no_pointers(files: list[Path]) -> None:
    """Raise ConfigInvalid if one of these files is a Git LFS pointer."""
    pointers = [file.name for file in files if _is_pointer(file)]
    if pointers:
        raise ConfigInvalid(
            f"in {files[0].parent} git has put Git LFS pointers in place of files ({some(pointers)}): run "
            "`git lfs pull` there"
        )


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ConfigInvalid if the file contains anything else."""
    try:
        check_no_pointers([file])
        read = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{file} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigInvalid(f"{file} holds a JSON {type(read).__name__}, not an object")
    return read


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory's safetensors files; empty if there are none.

    Raises:
        ConfigInvalid: The weights are in files of another kind, or a file is damaged.
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
    """Yield samples that identify a directory's weights: file names, sizes, headers and ends of tensors."""
    for file in weight_files(path):
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
            f"{index.parent} lacks {len(absent)} of the {len(files)} files of weights that {index.name} names, such as "
            f"{some(absent)}: copy them there"
        )
    return files


def _samples_of(file: Path) -> Iterator[bytes]:
    """Yield a safetensors file's header and both ends of each tensor; parts or all of another file."""
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
        if zipfile.is_zipfile(file):  # the directory at its end has a checksum of each tensor
            opened.seek(max(0, file.stat().st_size - _DIRECTORY_BYTES))
        while part := opened.read(_DIRECTORY_BYTES):  # a plain pickle is read completely
            yield part


def _tensors(file: Path) -> dict[str, Any]:
    """Return a safetensors file's header entries by tensor; raise ConfigInvalid if it is invalid or truncated."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            # Bounded by the file's size: another kind of file may begin with any number.
            tensors: dict[str, Any] = json.loads(opened.read(min(length, size)))
            tensors.pop("__metadata__", None)
            ends_at = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigInvalid(
                f"{file} is not a safetensors file, or its beginning is damaged: copy it again"
            ) from error
    if size != 8 + length + ends_at:
        raise ConfigInvalid(
            f"{file} has {size} bytes and by its header {8 + length + ends_at}: it was not copied whole; copy it again"
        )
    return tensors


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def some(names: list[str]) -> str:
    """Return the first three names, joined, with "and others" if there are more."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
