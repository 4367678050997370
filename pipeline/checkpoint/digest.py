"""Name the weights of a model by content, whatever files hold them."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.checkpoint.readers import TensorInfo, TensorSource, open_source

_BLOCK_BYTES = 8 << 20
_WORKERS = 2


def weights_digest(path: Path) -> str:
    """Return the sha256 over compact JSON of [name, dtype, shape, sha256 of bytes] per tensor, sorted by name.

    Names and types are Hugging Face's, so that a GGUF file and a folder with the same values have the same digest.

    Args:
        path: What :func:`pipeline.checkpoint.open_source` takes.

    Raises:
        SourceError: The source is damaged.
    """
    source = open_source(path)
    try:
        names = sorted(source.tensors)
        with ThreadPoolExecutor(_WORKERS) as pool:
            digests = pool.map(lambda name: _tensor_digest(source, name, source.tensors[name]), names)
            rows = [
                [name, source.tensors[name].dtype, list(source.tensors[name].shape), digest]
                for name, digest in zip(names, digests, strict=True)
            ]
    finally:
        source.close()
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _tensor_digest(source: TensorSource, name: str, info: TensorInfo) -> str:
    digest = hashlib.sha256()
    step = max(1, _BLOCK_BYTES // max(1, 4 * info.cols))
    for start in range(0, info.rows, step):
        digest.update(source.read(name, start, min(info.rows, start + step)).tobytes())
    return digest.hexdigest()
