"""Which files of a model folder matter, and copying them with their digests checked."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

# Weights in every format that can be read, configuration, tokenizer, licence. Never code.
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pth")
_WANTED = (
    *WEIGHTS,
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
# The one folder that belongs to a model: further templates of its tokenizer.
TEMPLATES = "additional_chat_templates"
# Leftovers of training that share a weight's ending.
_UNWANTED = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "*.index.json.tmp")

_BLOCK_BYTES = 4 << 20


def wanted(names: Iterable[str]) -> list[str]:
    """Return the names that a conversion can need, sorted; pickled weights only when there are no others.

    Args:
        names: Paths relative to the model's folder. Of folders only that of the templates counts.
    """
    chosen = sorted(name for name in names if _is_wanted(name))
    if any(fnmatch(name, "*.safetensors") for name in chosen):
        chosen = [name for name in chosen if not fnmatch(name, "*.bin") and not fnmatch(name, "*.pth")]
    return chosen


def _is_wanted(name: str) -> bool:
    folder, _, rest = name.rpartition("/")
    if folder:
        return folder == TEMPLATES and fnmatch(rest, "*.jinja")
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(fnmatch(name, p) for p in _UNWANTED)


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a file; ``on_bytes`` gets the size of each block read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            if on_bytes:
                on_bytes(len(block))
    return digest.hexdigest()


def copy_file(source: Path, target: Path) -> None:
    """Copy content only: links are followed, permissions and times are not taken over."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
