"""Reading a GGUF file: metadata, tokenizer, tensors in SmolLM2's four encodings."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_STRING, _ARRAY = 8, 9
# Encoding -> (name, weights in a block, bytes of a block).
_BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}


class _Reader:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return self.buffer[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        if kind >= len(_SCALARS):
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and float32 tensors of a GGUF file (version 2 or 3).

    Raises:
        ValueError: not a GGUF file, or a tensor encoding other than F32, F16, Q4_1
            and Q8_0.
    """
    with open(path, "rb") as file:
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ValueError(f"{path} is empty") from error
    with buffer:
        reader = _Reader(buffer)
        if buffer[:4] != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        reader.at = 4
        reader.scalar("I")  # version
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        meta = {}
        for _ in range(num_keys):
            key = reader.text()
            meta[key] = reader.value(reader.scalar("I"))
        entries = []
        for _ in range(num_tensors):
            name, rank = reader.text(), reader.scalar("I")
            shape = [reader.scalar("Q") for _ in range(rank)][::-1]
            entries.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
        step = meta.get("general.alignment", 32)
        start = -(-reader.at // step) * step
        tensors = {
            name: _decode(buffer, start + offset, shape, kind, name)
            for name, shape, kind, offset in entries
        }
    return meta, tensors


def read_tokenizer(meta: dict[str, Any]) -> Any:
    """Byte-level BPE from a GGUF file's metadata, as a ``tokenizers.Tokenizer``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    kinds = meta["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer


def _decode(
    buffer: mmap.mmap, at: int, shape: list[int], kind: int, name: str
) -> torch.Tensor:
    if kind not in _BLOCKS:
        raise ValueError(f"tensor {name}: encoding {kind} is not supported")
    encoding, per_block, size = _BLOCKS[kind]
    count = int(np.prod(shape))
    blocks = count // per_block
    raw = np.frombuffer(buffer, np.uint8, blocks * size, at).reshape(blocks, size)
    if encoding in ("F32", "F16"):
        dtype = np.float32 if encoding == "F32" else np.float16
        values = raw.reshape(-1).view(dtype).astype(np.float32)
    elif encoding == "Q8_0":  # w = d q
        scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
        values = scale * raw[:, 2:].view(np.int8)
    else:  # Q4_1: w = d q + m; low nibbles are the first half of the block
        ends = raw[:, :4].copy().view(np.float16).astype(np.float32)
        quants = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
        values = ends[:, :1] * quants + ends[:, 1:]
    return torch.from_numpy(np.ascontiguousarray(values).reshape(shape))
