"""The safetensors format, streamed: a JSON header, then the tensors' bytes, one after the other.

The library of that name wants a whole file in memory or on a local disk. Here a file is hashed while it is written to
any filesystem, and nothing that a header claims is believed before it fits the size the file really has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE = 8 << 20
_MOST_HEADER = 16 << 20


def encode(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file with these CPU tensors, in pieces of a few MB that are not copies."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned, as the library's do
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), _PIECE):
                yield content[start : start + _PIECE]


def decode(content: bytearray) -> dict[str, Tensor]:
    """The tensors of a file, as views of its bytes; raises ValueError, saying why, for what is not such a file."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(len(content) - 8, _MOST_HEADER):
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(content[8 : 8 + size]))
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    header.pop("__metadata__", None)
    return {name: _tensor(content, 8 + size, name, entry) for name, entry in header.items()}


def _tensor(content: bytearray, base: int, name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        bytes_ = math.prod(shape) * dtype.itemsize if whole else -1
    except (TypeError, KeyError, ValueError):
        bytes_ = start = end = -1
        dtype, shape = torch.uint8, []
    if bytes_ < 0 or end - start != bytes_ or base + end > len(content):
        raise ValueError(f"its header describes {name!r} wrongly")
    if bytes_ == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=bytes_ // dtype.itemsize, offset=base + start).view(shape)
