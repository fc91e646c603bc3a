"""A Hugging Face checkpoint on disk: config, tensor index, content identity. Tensors are read one at a time.

A checkpoint is a folder with `config.json` and either `model.safetensors` or shards named by
`model.safetensors.index.json`.
"""

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from twinflow.contracts.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

WHOLE_BYTES = 64 << 20  # checkpoints up to this size are hashed whole
SAMPLE_BYTES = 4 << 10  # of larger ones: this much at the start, middle and end of each tensor
MAX_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `file` from byte `start` to `end`; `dtype` as safetensors names it ("F32", "BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: configs and tensor index in memory, tensor data on disk."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads configs and headers. Raises ModelError for a missing or unreadable config, index or weight file."""
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        tensors: dict[str, TensorEntry] = {}
        for file, wanted in _weight_files(folder).items():
            entries = _read_header(file)
            missing = sorted(wanted - entries.keys()) if wanted else []
            if missing:
                raise ModelError(f"{file}: tensor {missing[0]!r} is listed in {INDEX_FILE} but not in the file")
            tensors |= entries
        return cls(folder, config, read_json(generation) if generation.is_file() else {}, tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the CPU. Raises ModelError when its file cannot be read."""
        entry = self.tensors[name]
        try:
            with safe_open(entry.file, framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{entry.file}: cannot read tensor {name!r}: {error}") from error

    @property
    def main_dtype(self) -> str | None:
        """The dtype that most bytes are stored in, as safetensors names it."""
        sizes: Counter[str] = Counter()
        for entry in self.tensors.values():
            sizes[entry.dtype] += entry.end - entry.start
        return sizes.most_common(1)[0][0] if sizes else None

    def content_digest(self) -> str:
        """Hex digest over names, dtypes, shapes and bytes; independent of the path and of how tensors are sharded.

        Checkpoints over 64 MiB contribute samples of each tensor instead of all bytes.
        """
        whole = sum(e.end - e.start for e in self.tensors.values()) <= WHOLE_BYTES
        digest = hashlib.blake2b(digest_size=16)
        opened: dict[Path, BinaryIO] = {}
        try:
            for name, entry in sorted(self.tensors.items()):
                digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
                if entry.file not in opened:
                    opened[entry.file] = entry.file.open("rb")
                file = opened[entry.file]
                for start, end in _samples(entry, whole):
                    file.seek(start)
                    digest.update(file.read(end - start))
        finally:
            for file in opened.values():
                file.close()
        return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file when it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model is a folder with config.json and safetensors files") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Weight files and the tensors that the index promises in each (empty set: whatever is there)."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ModelError(f"{index}: tensor {name!r} lies in {file!r}, outside the folder")
            files.setdefault(folder / file, set()).add(name)
        return files
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    raise ModelError(
        f"{folder} holds no safetensors weights (neither {SINGLE_FILE} nor {INDEX_FILE}); "
        "other formats are not read, convert the model with save_pretrained"
    )


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Header of a safetensors file: 8 bytes little-endian length, JSON of name -> dtype, shape, data_offsets."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{file} is no safetensors file: its header claims {length} bytes")
            header = json.loads(stream.read(length))
        base = 8 + length
        size = file.stat().st_size
        entries = {
            name: TensorEntry(
                file, tuple(e["shape"]), e["dtype"], base + e["data_offsets"][0], base + e["data_offsets"][1]
            )
            for name, e in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, though {INDEX_FILE} names it") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is no readable safetensors file: {error}") from error
    end = max((e.end for e in entries.values()), default=base)
    if size < end:
        raise ModelError(f"{file} is truncated: {size} bytes, its header describes {end}")
    return entries


def _samples(entry: TensorEntry, whole: bool) -> list[tuple[int, int]]:
    if whole or entry.end - entry.start <= 3 * SAMPLE_BYTES:
        return [(entry.start, entry.end)]
    middle = (entry.start + entry.end) // 2
    return [(at, at + SAMPLE_BYTES) for at in (entry.start, middle, entry.end - SAMPLE_BYTES)]
