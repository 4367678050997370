"""Read a checkpoint's rank files as one whole model: tensor parallel parts joined, pipeline stages put in a row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .config import ModelConfig
from .errors import EngineError
from .safetensors_file import SafetensorsFile, to_float32

Array = npt.NDArray[Any]
Join = Literal["same", "rows", "columns", "qkv", "halves"]

# Derived by the original loader from the config, or redundant; nothing is lost when they are ignored.
DERIVED = re.compile(
    r"rotary_inv_freq|embed_positions(_for_gpt_attention)?|.*\.clamp_val|.*_layernorm\.scale_to_int"
    r"|.*\.attention\.(kv_cache_rcp|k_cache|v_cache)_scaling_factor"
)


class Checkpoint:
    """The tensors of a checkpoint folder by whole-model name, with global layer numbers.

    A tensor nobody asked for is an error at the end of loading (:meth:`require_all_used`): a bias the engine would
    leave out would make it a false witness.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = folder
        self.config = config
        self._ranks = [SafetensorsFile(folder / f"rank{rank}.safetensors") for rank in range(config.tp * config.pp)]
        self._used: set[tuple[int, str]] = set()
        self._first_layers = _first_layers(config.layers, config.pp)

    def has(self, name: str) -> bool:
        """Say whether the tensor is stored (on the first rank of its stage)."""
        stage, local = self._locate(name)
        return local in self._ranks[stage * self.config.tp].names()

    def tensor(self, name: str, join: Join, shape: tuple[int, ...]) -> Array:
        """Return a whole tensor in its stored type.

        Args:
            name: With the global layer number, ``transformer.layers.7.mlp.fc.weight``.
            join: How the parts of the tensor parallel ranks fit together. ``same``: equal copies. ``rows`` and
                ``columns``: along the first and the last axis. ``qkv``: each rank holds rows of q, of k and of v.
                ``halves``: each rank holds rows of two matrices, along the last axis but one (of a vector, its own).
            shape: What the joined tensor must have. A first axis that is longer only by vocabulary padding is cut.

        Raises:
            EngineError: The tensor is missing on a rank, has another shape, or copies differ.
        """
        return self._whole(name, join, shape, is_vector=False)

    def stored_size(self, name: str) -> int:
        """Return how many items the tensor has on the first rank of its stage; 0 when it is missing."""
        if not self.has(name):
            return 0
        stage, local = self._locate(name)
        return int(self._ranks[stage * self.config.tp].tensor(local).size)

    def stored_type(self, name: str) -> np.dtype[Any]:
        """Return the type of the tensor on the first rank of its stage."""
        stage, local = self._locate(name)
        return self._ranks[stage * self.config.tp].tensor(local).dtype

    def vector(self, name: str, join: Join, size: int) -> npt.NDArray[np.float32]:
        """Return a tensor of one long axis, stored as [size], [1, size] or a scalar, widened to float32 [size].

        Raises:
            EngineError: As for :meth:`tensor`.
        """
        return to_float32(self._whole(name, join, (size,), is_vector=True))

    def require_all_used(self) -> None:
        """Refuse a checkpoint with tensors that nothing asked for.

        Raises:
            EngineError: Names the tensors.
        """
        left = sorted(
            f"{file.path.name}: {name}"
            for rank, file in enumerate(self._ranks)
            for name in file.names()
            if (rank, name) not in self._used and not DERIVED.fullmatch(name)
        )
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise EngineError(
                f"{self.folder}: {self.config.architecture} with this config has no place for {shown}; "
                "the model would be executed without them"
            )

    def _locate(self, name: str) -> tuple[int, str]:
        match = re.match(r"transformer\.layers\.(\d+)\.(.*)", name)
        if match:
            layer = int(match[1])
            stage = max(s for s, first in enumerate(self._first_layers) if first <= layer)
            return stage, f"transformer.layers.{layer - self._first_layers[stage]}.{match[2]}"
        is_first = name.startswith(("transformer.vocab_embedding", "transformer.position_embedding"))
        return 0 if is_first else self.config.pp - 1, name

    def _whole(self, name: str, join: Join, shape: tuple[int, ...], *, is_vector: bool) -> Array:
        stage, local = self._locate(name)
        parts = [self._part(stage * self.config.tp + rank, local, name) for rank in range(self.config.tp)]
        if is_vector:
            parts = [part.reshape(-1) for part in parts]
        whole = self._join(name, parts, join)
        if join == "rows" and shape[0] == self.config.vocab_size and shape[0] < len(whole) < shape[0] + self.config.tp:
            whole = whole[: shape[0]]
        if whole.shape != shape:
            joined = f" after joining tp {self.config.tp}" if self.config.tp > 1 else ""
            raise EngineError(f"{self.folder}: {name} has shape {whole.shape}{joined}; the config expects {shape}")
        return whole

    def _part(self, rank: int, local: str, name: str) -> Array:
        if local not in self._ranks[rank].names():
            as_stored = f" (stored as {local})" if local != name else ""
            raise EngineError(f"{self._ranks[rank].path}: tensor {name}{as_stored} is missing")
        self._used.add((rank, local))
        return self._ranks[rank].tensor(local)

    def _join(self, name: str, parts: Sequence[Array], join: Join) -> Array:
        if len(parts) == 1:
            return parts[0]
        if join == "same":
            for rank, part in enumerate(parts):
                if part.shape != parts[0].shape or part.tobytes() != parts[0].tobytes():
                    raise EngineError(f"{self.folder}: {name} must be equal on all ranks; rank {rank} differs")
            return parts[0]
        if join == "rows":
            return np.concatenate(parts, axis=0)
        if join == "columns":
            return np.concatenate(parts, axis=-1)
        if join == "halves":
            axis = max(-2, -parts[0].ndim)
            pairs = [np.split(part, 2, axis=axis) for part in parts]
            return np.concatenate([pair[half] for half in (0, 1) for pair in pairs], axis=axis)
        return self._join_qkv(parts)

    def _join_qkv(self, parts: Sequence[Array]) -> Array:
        config = self.config
        q_heads, kv_heads = config.heads // config.tp, max(1, config.kv_heads // config.tp)
        copies = max(1, config.tp // config.kv_heads)
        rows_per_head = parts[0].shape[0] // (q_heads + 2 * kv_heads)
        ends = [q_heads * rows_per_head, (q_heads + kv_heads) * rows_per_head]
        split = [np.split(part, ends, axis=0) for part in parts]
        queries = [q for q, _, _ in split]
        # NOTE: with more ranks than key/value heads each head is stored on `copies` neighbouring ranks; take one.
        keys = [k for _, k, _ in split[::copies]]
        values = [v for _, _, v in split[::copies]]
        return np.concatenate(queries + keys + values, axis=0)


def _first_layers(layers: int, stages: int) -> list[int]:
    """Return the first layer of each pipeline stage; the first stages take one more when it does not divide."""
    share, more = divmod(layers, stages)
    return [stage * share + min(stage, more) for stage in range(stages)]


def checkpoint_digest(folder: Path) -> str:
    """Return the sha256 over names and bytes of ``config.json`` and the rank files."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("rank*.safetensors"))]:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
