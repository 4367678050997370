"""Three repositories for engines, for several releases; their configs are compared with files in tests/golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_files import write_engine

from pipeline.triton.engine_repository import EngineModel, emit_engines
from pipeline.triton.engine_serving import Batching, Bls, EngineServing, KvCache, LoraCache, Periods
from pipeline.triton.placement import Placement
from pipeline.triton.repository import RepositorySettings, emit_repository

RELEASES = ("0.20.0", "1.0.0", "1.2.1")


def settings(serving: EngineServing | None = None, release: str = "") -> RepositorySettings:
    return RepositorySettings(max_batch_size=8, max_seq_len=2048, target="engine", serving=serving, release=release)


def emit_plain(root: Path, tokenizer: Path, release: str) -> Path:
    """One engine on one GPU, nothing set."""
    engine = write_engine(root / "engine", release=release)
    out = root / "repository"
    emit_repository(out, checkpoint=engine, tokenizer=tokenizer, settings=settings(release=release))
    return out


def emit_replicas(root: Path, tokenizer: Path, release: str) -> Path:
    """Two copies over two GPUs each, with a bounded queue, a bounded cache and room for adapters."""
    engine = write_engine(
        root / "engine",
        release=release,
        tp=2,
        dtype="bfloat16",
        gather_context_logits=True,
        plugins={"lora_plugin": "a"},
    )
    serving = EngineServing(
        batching=Batching(scheduler_policy="max_utilization", max_queue_size=128, max_queue_delay_us=100),
        kv_cache=KvCache(free_gpu_memory_fraction=0.85, max_tokens=65536, host_memory_bytes=1 << 32),
        lora=LoraCache(max_rank=32, gpu_memory_fraction=0.1, prefetch_dir="/models/adapters"),
        periods=Periods(cancellation_ms=50, receive_ms=1),
        placement=Placement(gpus=(4, 5, 6, 7), replicas=2),
    )
    out = root / "repository"
    emit_repository(out, checkpoint=engine, tokenizer=tokenizer, settings=settings(serving))
    return out


def emit_draft(root: Path, tokenizer: Path, release: str) -> Path:
    """An engine and a small one that drafts for it."""
    engine = write_engine(root / "engine", release=release, speculative_decoding_mode=2, max_draft_len=8)
    draft = write_engine(root / "draft", release=release, gather_generation_logits=True, max_batch_size=4)
    cache = KvCache(max_tokens=32768)
    serving = EngineServing(kv_cache=cache, bls=Bls(draft_tokens=4), placement=Placement(gpus=(0,)))
    draft_serving = EngineServing(kv_cache=cache, placement=Placement(gpus=(1,)))
    model = EngineModel(engine, tokenizer, settings(serving), draft=draft, draft_serving=draft_serving)
    out = root / "repository"
    emit_engines(out, [model])
    return out


RECIPES: dict[str, Callable[[Path, Path, str], Path]] = {
    "plain": emit_plain,
    "replicas": emit_replicas,
    "draft": emit_draft,
}
