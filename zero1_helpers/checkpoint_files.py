"""The files of a checkpoint, and how they are read: what is loaded is data, and never code.

- `model-0000R-of-0000N.safetensors` and their index, as transformers writes them: the weights. Any tool reads
  them, and there is nothing in them but tensors.
- `__R_0.distcp` and `.metadata`, the files of torch.distributed.checkpoint (DCP): the optimizer's state, and
  what else there is. `.metadata` is a pickle, and so is every object in the other files. Here they are read
  by unpicklers that know tensors, numbers, strings and DCP's own index, and refuse everything else.
  **Torch's own `dcp.load` refuses nothing**: it runs what a stranger has put into these files.
"""

import io
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

INDEX = "model.safetensors.index.json"
IN_AN_INDEX = {  # all that DCP's index is made of
    "torch": {
        "Size",
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
}


# Weights


def save_weights(
    folder, tensors: Mapping[str, Tensor], owner_of: Mapping[str, int], rank: int, ranks: int
):
    """Write the tensors that this rank owns to a file of its own; rank 0 also the index of all files."""
    os.makedirs(folder, exist_ok=True)
    names = [f"model-{r + 1:05}-of-{ranks:05}.safetensors" for r in range(ranks)]
    mine = {
        n: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for n, t in tensors.items()
        if owner_of[n] == rank
    }
    save_file(mine, Path(folder, names[rank]), {"format": "pt"})
    if rank == 0:
        size = sum(t.nbytes for t in tensors.values())
        where = {name: names[owner] for name, owner in owner_of.items()}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        Path(folder, INDEX).write_text(json.dumps(index, indent=1))


def load_weights(folder: str | os.PathLike) -> dict[str, Tensor]:
    """All weights of a checkpoint, on the CPU; on disk until somebody reads them."""
    where = json.loads(Path(folder, INDEX).read_text())["weight_map"]
    found = {}
    for file in sorted(set(where.values())):
        if file != Path(file).name:
            raise ValueError(f"{INDEX} in {folder} names {file}, a file outside of the checkpoint")
        with safe_open(Path(folder, file), "pt") as weights:
            found |= {
                name: weights.get_tensor(name) for name in weights.keys() if where.get(name) == file
            }  # noqa: SIM118
    if missing := sorted(set(where) - set(found)):
        raise ValueError(f"{missing[0]} is in the index of {folder}, and in none of its files")
    return found


def fits_safetensors(value) -> bool:
    """Complex numbers of 128 bits and what is no tensor have no place there; DCP takes them."""
    return isinstance(value, Tensor) and value.dtype != torch.complex128


# Data and no code


class IndexUnpickler(pickle.Unpickler):
    """Knows what DCP's index is made of, and nothing else."""

    def find_class(self, module: str, name: str):
        if name not in IN_AN_INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class DataReader(dcp.FileSystemReader):
    """DCP's reader, with an unpickler that runs nothing."""

    def read_metadata(self, *args, **kwargs):
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            data = stream.read()
        try:
            metadata = IndexUnpickler(io.BytesIO(data)).load()
            metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{path} is no index of a checkpoint ({reason}), and is not loaded"
            ) from error
        return metadata


def read_data(data: io.BytesIO, name: str):
    """A saved object, if it is data: tensors, numbers, strings, and lists and dicts of them."""
    try:
        return torch.load(data, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} in the checkpoint is more than tensors, numbers, strings, lists and dicts, and is not "
            "loaded"
        ) from error


def check_data(values: Mapping) -> ValueError | None:
    """What could be written, but not be read again, because it is more than data."""
    for name, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            read_data(file, name)
        except Exception:
            return ValueError(
                f"{name} is more than tensors, numbers, strings, lists and dicts ({type(value).__name__}); "
                "a checkpoint holds data only, so turn it into these first (a numpy array by torch.tensor)"
            )
    return None


# Pieces of a row


@dataclass
class Piece:
    """Elements from `start` on, as many as `row` has, of a row of `total`."""

    row: Tensor
    start: int
    total: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), self.row.shape)

    def written(self, path: str) -> WriteItem:
        about = TensorWriteData(
            self.chunk, TensorProperties.create_from_tensor(self.row), torch.Size([self.total])
        )
        return WriteItem(
            MetadataIndex(path, self.chunk.offsets), WriteItemType.SHARD, tensor_data=about
        )


class Writer(dcp.DefaultSavePlanner):
    """DCP's plan, and this rank's pieces."""

    def __init__(self, pieces: dict[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [piece.written(path) for path, piece in self.pieces.items()]
        return replace(plan, items=[*plan.items, *items])

    def lookup_object(self, index):
        return (
            self.pieces[index.fqn].row if index.fqn in self.pieces else super().lookup_object(index)
        )


class Reader(dcp.DefaultLoadPlanner):
    """DCP's plan, and from whichever files hold them, this rank's pieces."""

    def __init__(self, pieces: dict[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self):
        plan, stored = super().create_local_plan(), self.metadata.state_dict_metadata
        items = [
            item
            for path, piece in self.pieces.items()
            for item in create_read_items_for_chunk_list(path, stored[path], [piece.chunk])
        ]
        return replace(plan, items=[*plan.items, *items])

    def lookup_tensor(self, index):
        return (
            self.pieces[index.fqn].row if index.fqn in self.pieces else super().lookup_tensor(index)
        )

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = read_data(value, name)


def room_for(saved, like: Tensor | None = None) -> Tensor | None:
    """Where DCP puts a saved tensor; an object needs none."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if like is None:
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return torch.empty_like(like, dtype=saved.properties.dtype)


def load_dcp(values: dict, reader: DataReader, pieces: dict[str, Piece], process_group) -> None:
    """dcp.load, whose error is the first one of any rank, and not a page of tracebacks."""
    try:
        dcp.load(values, storage_reader=reader, planner=Reader(pieces), process_group=process_group)
    except dcp.api.CheckpointException as error:
        raise next(of_rank for of_rank, _ in error.failures.values()) from None
