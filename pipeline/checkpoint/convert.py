"""Convert a model to a TensorRT-LLM checkpoint."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pipeline.checkpoint.binding import Target
from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import itemsize
from pipeline.checkpoint.execution import Progress, execute, gather_copies
from pipeline.checkpoint.options import ConversionReport, ConvertOptions
from pipeline.checkpoint.planning import ConversionPlan, plan_conversion
from pipeline.checkpoint.readers import TensorSource, open_source
from pipeline.checkpoint.writer import PARTIAL, SafetensorsWriter, sync_folder, write_json
from pipeline.errors import SourceError, StoreError

_DIGEST_BLOCK = 4 << 20


def convert_checkpoint(
    source: Path, out: Path, *, options: ConvertOptions | None = None, progress: Progress | None = None
) -> ConversionReport:
    """Convert a model.

    Writes ``rank{r}.safetensors`` and, when all of them are on disk, ``config.json``. After an error or a kill
    there is no ``config.json``, so nothing looks complete.

    Args:
        source: Folder with config.json and weights, a ``.gguf`` file, or a folder with exactly one.
        out: Folder to write into; made if missing. Must not hold a finished checkpoint.
        options: See :class:`ConvertOptions`.
        progress: Called with (bytes done, bytes in all, "bytes").

    Raises:
        SourceError: The source is damaged, unsupported, or holds values that would not survive.
        ConfigError: tp or pp does not fit the model.
        StoreError: ``out`` is in use, or cannot be written.
    """
    options = options or ConvertOptions()
    began = time.monotonic()
    opened = open_source(source, dequantize=options.dequantize)
    try:
        plan = plan_conversion(opened, options)
        _prepare_folder(out, plan)
        workers = options.workers or min(4, os.cpu_count() or 1)
        _refuse_unequal(opened, plan)
        # Beside the conversion: hashing one file is a serial task, and waiting for the disk leaves time for it.
        with _digesting(opened, wanted=options.digest_source) as pending:
            nbytes = _write_ranks(plan, out, workers, progress)
        digest = pending.result()
        write_json(out / "config.json", plan.config)
    finally:
        opened.close()
    return ConversionReport(
        architecture=plan.architecture.name,
        family=plan.family.name,
        dtype=plan.dtype,
        tp=options.tp,
        pp=options.pp,
        source_tensors=len(opened.tensors),
        target_tensors=sum(len(targets) for targets in plan.ranks),
        parameters=sum(math.prod(info.shape) for info in opened.tensors.values()),
        dtypes=_dtypes_by_class(plan.ranks),
        source_bytes=sum(info.nbytes for info in opened.tensors.values()),
        target_bytes=nbytes,
        ignored_files=dict(opened.ignored_files),
        ignored_tensors=dict(plan.ignored_tensors),
        warnings=plan.warnings,
        source_digest=digest,
        seconds=time.monotonic() - began,
    )


@contextmanager
def _digesting(source: TensorSource, *, wanted: bool) -> Iterator[Future[str]]:
    """Compute :func:`source_digest` in a thread; an error in the block ends it early."""
    stop = threading.Event()
    if not wanted:
        stop.set()
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        try:
            yield pool.submit(source_digest, source, stop)
        except BaseException:
            stop.set()
            raise


def _write_ranks(plan: ConversionPlan, out: Path, workers: int, progress: Progress | None) -> int:
    writers: list[SafetensorsWriter] = []
    try:
        for rank, targets in enumerate(plan.ranks):
            specs = {target.name: (target.shape, target.dtype) for target in targets}
            writers.append(SafetensorsWriter(out / f"rank{rank}.safetensors", specs))
        execute(gather_copies(plan.ranks), writers, workers=workers, progress=progress)
        for writer in writers:
            writer.finish()
        sync_folder(out)
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    return sum(writer.nbytes for writer in writers)


def _prepare_folder(out: Path, plan: ConversionPlan) -> None:
    """Make the folder, clear remains of an aborted run, and check the space.

    Raises:
        StoreError: The folder holds a finished checkpoint or a model, or the disk is too small.
    """
    if (out / "config.json").exists():
        raise StoreError(f"{out}: already holds a config.json", hint="choose another folder, or remove this one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in (*out.glob("rank*.safetensors"), *out.glob(f"*{PARTIAL}")):
            stale.unlink()
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise StoreError(f"{out}: cannot be used as output folder ({error.strerror or error})") from error
    needed = sum(_nbytes(target) for targets in plan.ranks for target in targets)
    if needed > free:
        raise StoreError(f"{out}: needs {needed} bytes, {free} are free", hint="free space or choose another folder")


def _refuse_unequal(source: TensorSource, plan: ConversionPlan) -> None:
    """Refuse a stored head that differs from the embedding it is said to be tied to."""
    for kept, dropped in plan.duplicates:
        a, b = source.tensors[kept], source.tensors[dropped]
        equal = (a.shape, a.dtype) == (b.shape, b.dtype)
        for start, stop in row_blocks(a) if equal else ():
            equal = source.read(kept, start, stop).tobytes() == source.read(dropped, start, stop).tobytes()
            if not equal:
                break
        if not equal:
            raise SourceError(
                f"{b.file}: {dropped} differs from {kept}, but the config says they are tied",
                hint="set tie_word_embeddings to false in config.json if the stored head is meant",
            )


def source_digest(source: TensorSource, stop: threading.Event | None = None) -> str:
    """Return one sha256 over the digests of config.json (if any) and all weight files, in a fixed order.

    Args:
        source: An opened source.
        stop: When set, hashing ends early and the result is empty.
    """
    config = source.path / "config.json"
    files = (*((config,) if config.is_file() else ()), *source.weight_files())
    total = hashlib.sha256()
    buffer = bytearray(_DIGEST_BLOCK)
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while (stop is None or not stop.is_set()) and (count := stream.readinto(buffer)):
                digest.update(memoryview(buffer)[:count])
        if stop is not None and stop.is_set():
            return ""
        total.update(f"{path.name} {digest.hexdigest()}\n".encode())
    return total.hexdigest()


def _nbytes(target: Target) -> int:
    return math.prod(target.shape) * itemsize(target.dtype)


def _dtypes_by_class(ranks: tuple[tuple[Target, ...], ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for targets in ranks:
        for target in targets:
            found.setdefault(tensor_class(target.name), set()).add(target.dtype)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def tensor_class(name: str) -> str:
    """Return ``matrix``, ``norm``, ``bias`` or ``scale`` for a tensor of a checkpoint."""
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return "bias"
    if kind != "weight":
        return "scale"
    return "norm" if "layernorm" in module or module.endswith("ln_f") else "matrix"
