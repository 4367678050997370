"""The options of one engine build: what is passed to ``trtllm-build`` and what the defaults make of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Finding
from pipeline.toolchains import command
from pipeline.toolchains.job import Family, FlagValue, ToolJob
from pipeline.toolchains.release import FlagTable, Release, data

TOOL = "trtllm-build"

# Flags the adapter sets itself: the container paths are part of the contract with the runner.
RESERVED = {
    "checkpoint_dir": "the checkpoint comes from the convert stage",
    "output_dir": "the output goes to the store",
    "model_config": "the checkpoint comes from the convert stage; without weights nothing can be judged",
}

# Flags that name a file or folder of this machine: mounted read-only, argv gets the container path.
FILE_FLAGS = ("build_config", "model_cls_file", "input_timing_cache")

# Config path of the flags that the configuration has nouns for.
PATHS: Mapping[str, str] = {
    "max_batch_size": "limits.max_batch_size",
    "max_input_len": "limits.max_input_len",
    "max_seq_len": "limits.max_seq_len",
    "max_num_tokens": "limits.max_num_tokens",
    "max_beam_width": "limits.max_beam_width",
    "speculative_decoding_mode": "speculative.mode",
    "max_draft_len": "speculative.max_draft_len",
    "lora_plugin": "lora",
    "dora_plugin": "lora.dora",
    "max_lora_rank": "lora.max_rank",
    "lora_target_modules": "lora.target_modules",
    "lora_dir": "lora.adapters",
    "multiple_profiles": "build.multiple_profiles",
    "weight_streaming": "build.weight_streaming",
    "workers": "build.workers",
}


@dataclass(frozen=True, slots=True)
class BuildView:
    """One engine build, as rules and adapters look at it.

    Attributes:
        job: The job.
        family: Its model family.
        release: The release that builds.
        algorithm: ``quant_algo`` of the checkpoint, ``none`` for 16 bit.
        passed: Value of every flag that is passed, by name without dashes.
        table: Flags of the builder in this release.
    """

    job: ToolJob
    family: Family
    release: Release
    algorithm: str
    passed: Mapping[str, FlagValue]
    table: FlagTable

    @staticmethod
    def of(job: ToolJob, family: Family, release: Release, algorithm: str) -> BuildView:
        """Make the view of a job; findings about its flags come from :func:`build_values`."""
        return BuildView(job, family, release, algorithm, build_values(job, algorithm)[0], release.table(TOOL))

    def has(self, key: str) -> bool:
        """Say whether the release has a flag."""
        return self.table.find(f"--{key}") is not None

    def value(self, key: str) -> Any:
        """Return what a flag comes to: passed or default; None when the release has no such flag."""
        value = self.passed.get(key)
        flag = self.table.find(f"--{key}")
        if value is None:
            return flag.default if flag else None
        if isinstance(value, bool) and flag is not None and flag.is_toggle:
            return "enable" if value else "disable"
        return value

    def is_on(self, key: str) -> bool:
        """Say whether a switch is given, a toggle enabled, or a plugin not disabled."""
        return self.value(key) not in (None, False, "disable", "")

    def is_passed(self, key: str) -> bool:
        """Say whether the user chose the value, rather than upstream's default."""
        return self.passed.get(key) is not None

    def number(self, key: str) -> int:
        """Return a whole number flag; 0 when it is unset or no number (another finding says so)."""
        value = self.value(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    @property
    def kv_algorithm(self) -> str:
        """KV cache type of the checkpoint: ``none``, ``int8`` or ``fp8``."""
        return "none" if self.job.kv_cache == "auto" else self.job.kv_cache

    @property
    def weights(self) -> str:
        """Weight type in words, for messages."""
        return "16 bit" if self.algorithm == "none" else self.algorithm

    @property
    def max_draft_len(self) -> int:
        """Draft tokens the engine is built for; 0 when none or only the checkpoint knows."""
        return self.number("max_draft_len")

    def path(self, key: str) -> str:
        """Return the config path of a flag."""
        return flag_paths(self.job).get(key, f"build.flags.{key}")


def flag_paths(job: ToolJob) -> Mapping[str, str]:
    """Return the config path of every flag that has a noun and was not given as a free flag."""
    return {key: path for key, path in PATHS.items() if key not in job.flags} if job.flags else PATHS


def build_values(job: ToolJob, algorithm: str) -> tuple[dict[str, FlagValue], list[Finding]]:
    """Put together every flag of the engine build, in the order in which it is passed.

    Returns:
        Values by flag name without dashes, and findings for flags that the user may not set here.
    """
    limits = job.limits
    values: dict[str, FlagValue] = {
        "checkpoint_dir": command.CHECKPOINT,
        "output_dir": command.OUT,
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": limits.max_beam_width,
        "workers": build_workers(job),
        "output_timing_cache": f"{command.OUT}/model.cache",
        "input_timing_cache": f"{command.TIMING_CACHE}/model.cache" if job.reuse_timing_cache else None,
        "gemm_plugin": _gemm_plugin(job, algorithm),
        "multiple_profiles": "enable" if job.multiple_profiles else None,
        "weight_streaming": True if job.weight_streaming else None,
        **_speculative(job),
        **_lora(job),
    }
    findings = []
    for name, value in job.flags.items():
        key = name.lstrip("-")
        path = f"build.flags.{key}"
        if key in RESERVED:
            message = f"{key} is set by the pipeline: {RESERVED[key]}"
            findings.append(Finding("flag-reserved", "error", path, message, "remove it"))
        elif key in PATHS and values.get(key) not in (None, value):
            message = f"{key} is given twice: {values[key]!r} by {PATHS[key]}, {value!r} here"
            findings.append(Finding("flag-set-twice", "error", path, message, f"keep {PATHS[key]} only"))
        elif key in FILE_FLAGS and value is not None:
            values[key] = f"{command.FILES}/{key}"
        elif key == "visualize_network" and not str(value).startswith(f"{command.OUT}/"):
            message = f"{key}={value!r} is written inside the container: expected a folder below {command.OUT}/"
            findings.append(Finding("flag-host-path", "error", path, message, f"{path}={command.OUT}/network"))
        elif key == "lora_dir":
            message = "adapter folders are mounted by the pipeline"
            findings.append(Finding("flag-reserved", "error", path, message, "use lora.adapters"))
        else:
            values[key] = value
    return {key: value for key, value in values.items() if value is not None}, findings


def build_workers(job: ToolJob) -> int:
    """Parallel build processes: one per rank, no more than there are GPUs (upstream caps it there)."""
    return job.workers or min(job.world_size, job.gpu_count or job.world_size)


def _gemm_plugin(job: ToolJob, algorithm: str) -> FlagValue:
    if job.weight_streaming:
        return "disable"  # weights inside plugins cannot be streamed
    choices = data("routes")["gemm_plugin"]
    value: FlagValue = choices.get(algorithm, choices["default"])
    return value


def _speculative(job: ToolJob) -> dict[str, FlagValue]:
    if job.speculative is None:
        return {}
    return {
        "speculative_decoding_mode": job.speculative.mode,
        "max_draft_len": job.speculative.draft_len or None,
    }


def _lora(job: ToolJob) -> dict[str, FlagValue]:
    lora = job.lora
    if lora is None:
        return {}
    return {
        "lora_plugin": "auto",
        "dora_plugin": "enable" if lora.dora else None,
        "max_lora_rank": lora.max_rank,
        "lora_target_modules": lora.target_modules or None,
        "lora_dir": [f"{command.LORA}/{index}" for index in range(lora.adapters)] or None,
    }
