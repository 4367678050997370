"""Emit a Triton model repository that just loads: self-contained, relocatable, every shared value derived once.

Layout (target ``reference``)::

    tensorrt_llm/    config.pbtxt  1/ model.py, the engine's code in reference/, config.json, rank*.safetensors,
                                      tokenizer.json for guided decoding, where llguidance understands it
    preprocessing/   config.pbtxt  1/ model.py, tokenizer/
    postprocessing/  config.pbtxt  1/ model.py, tokenizer/
    ensemble/        config.pbtxt  1/ (empty but for a note: the version folder must exist)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeline
from pipeline.errors import ConfigError, SourceError
from pipeline.facts.shipped import shipped
from pipeline.triton import tensors
from pipeline.triton.engine_serving import EngineServing
from pipeline.triton.layout import (
    LAYOUT_VERSION,
    STAMP,
    VERSION_FOLDER,
    copy_file,
    copy_tokenizer,
    copy_tree,
    files_of,
    link_or_copy,
)
from pipeline.triton.model_config import ModelConfig, ensemble_model, python_model, write_config
from pipeline.triton.special_ids import SpecialIds, read_special_ids
from pipeline.triton.text_models import text_configs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """What is decided once and has to agree in every model of a repository.

    Attributes:
        max_batch_size: Sequences in flight in the engine; also the rows Triton lets one request have.
        max_seq_len: Prompt plus new tokens of one sequence.
        threads: Threads of the reference engine; None lets the engine decide.
        target: What answers: ``reference`` or ``engine``.
        decoupled: Whether a request may get several responses; streaming, several rows and several sequences need it.
        preprocessing_instances: Processes that encode.
        postprocessing_instances: Processes that decode; with more than one, an ensemble's stream may be reordered.
        exclude_input_in_output: Answer with the new tokens only, unless the request says otherwise.
        add_special_tokens: Let preprocessing add what the tokenizer adds to a prompt (BOS, and exactly once).
        skip_special_tokens: Leave special tokens out of the text.
        serving: How an engine is served; None takes the defaults. Only for ``engine``.
        release: TensorRT-LLM release of the image that serves the engine; empty when it is not known.
    """

    max_batch_size: int
    max_seq_len: int
    threads: int | None = None
    target: str = "reference"
    decoupled: bool = True
    preprocessing_instances: int = 1
    postprocessing_instances: int = 1
    exclude_input_in_output: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    serving: EngineServing | None = None
    release: str = ""


def emit_repository(out: Path, *, checkpoint: Path, tokenizer: Path, settings: RepositorySettings) -> None:
    """Write a model repository.

    Args:
        out: Folder to create; must be empty or absent.
        checkpoint: TensorRT-LLM checkpoint: ``config.json`` and ``rank*.safetensors``; for ``engine`` the engines:
            ``config.json`` and ``rank*.engine``. Large files are hard-linked where the file system allows.
        tokenizer: ``tokenizer.json`` and its companions; copied.
        settings: Shared values.

    Raises:
        ConfigError: A setting is impossible.
        SourceError: An input is missing or damaged, or ``out`` has files.
    """
    _check_settings(settings)
    if out.exists() and any(out.iterdir()):
        raise SourceError(f"{out} is not empty", hint="emit into a new folder")
    if not (tokenizer / "tokenizer.json").is_file():
        raise SourceError(f"{tokenizer} has no tokenizer.json; the repository cannot turn text into tokens without it")
    _TARGETS[settings.target](out, checkpoint, tokenizer, settings)


def _emit_reference(out: Path, checkpoint: Path, tokenizer: Path, settings: RepositorySettings) -> None:
    vocab_size = _vocab_size(checkpoint)
    templates = shipped("triton_repo") / "reference"
    guided = has_guided_decoding(tokenizer / "tokenizer.json")
    configs = reference_configs(settings, read_special_ids(tokenizer), vocab_size, guided=guided)
    for name, config in configs.items():
        write_config(out / name, config)
        copy_tree(templates / name / VERSION_FOLDER, out / name / VERSION_FOLDER)
    engine = out / "tensorrt_llm" / VERSION_FOLDER
    copy_tree(Path(pipeline.__file__).parent / "engines" / "reference", engine / "reference")
    for source in files_of(checkpoint):
        if (engine / source.name).exists():
            raise SourceError(f"{source} would overwrite a file of the Triton model of that name")
        link_or_copy(source, engine / source.name)
    if guided:
        copy_file(tokenizer / "tokenizer.json", engine / "tokenizer.json")
    for name in ("preprocessing", "postprocessing"):
        copy_tokenizer(tokenizer, out / name / VERSION_FOLDER)


def has_guided_decoding(tokenizer: Path) -> bool:
    """Say whether llguidance can read a ``tokenizer.json``; it knows byte-level and byte-fallback vocabularies."""
    from llguidance import LLTokenizer

    try:
        LLTokenizer(tokenizer.read_text(encoding="utf-8"))
    except Exception as error:  # whatever its Rust side raises, the rest of the model works
        _log.info("no guided decoding: llguidance cannot read %s: %s", tokenizer.name, error)
        return False
    return True


def reference_configs(
    settings: RepositorySettings, ids: SpecialIds, vocab_size: int, *, guided: bool = False
) -> dict[str, ModelConfig]:
    """Return the config of each model of a ``reference`` repository, by name.

    Args:
        settings: Shared values.
        ids: End and padding ids of the tokenizer.
        vocab_size: Vocabulary of the engine, without padding.
        guided: Whether the repository has guided decoding.
    """
    end_ids = ",".join(map(str, ids.end_ids))
    batch = settings.max_batch_size
    configs = {
        "tensorrt_llm": python_model(
            "tensorrt_llm",
            inputs=tensors.LLM_INPUTS + tensors.OWN_LLM_INPUTS,
            outputs=tensors.LLM_OUTPUTS + tensors.OWN_LLM_OUTPUTS,
            max_batch_size=batch,
            decoupled=settings.decoupled,
            parameters={
                "target": settings.target,
                "max_num_sequences": str(batch),
                "max_seq_len": str(settings.max_seq_len),
                "threads": "" if settings.threads is None else str(settings.threads),
                "exclude_input_in_output": _flag(settings.exclude_input_in_output),
                "max_beam_width": "1",
                "end_ids": end_ids,
                "guided_decoding_backend": "llguidance" if guided else "",
            },
        ),
        **text_configs(settings, ids, vocab_size),
        "ensemble": ensemble_model(max_batch_size=batch, decoupled=settings.decoupled),
    }
    for config in configs.values():
        config.parameters[STAMP].string_value = f"{settings.target}/{LAYOUT_VERSION}"
    return configs


def _emit_engine(out: Path, checkpoint: Path, tokenizer: Path, settings: RepositorySettings) -> None:
    from pipeline.triton.engine_repository import EngineModel, emit_engines

    emit_engines(out, [EngineModel(checkpoint, tokenizer, settings)])


_TARGETS: dict[str, Callable[[Path, Path, Path, RepositorySettings], None]] = {
    "reference": _emit_reference,
    "engine": _emit_engine,
}


def _check_settings(settings: RepositorySettings) -> None:
    if settings.target not in _TARGETS:
        raise ConfigError(f"target is {settings.target!r}, a repository can be emitted for {', '.join(_TARGETS)}")
    lowest = {
        "max_batch_size": (settings.max_batch_size, 1),
        "max_seq_len": (settings.max_seq_len, 2),
        "threads": (1 if settings.threads is None else settings.threads, 1),
        "preprocessing_instances": (settings.preprocessing_instances, 1),
        "postprocessing_instances": (settings.postprocessing_instances, 1),
    }
    wrong = [f"{name} is {value}, expected at least {low}" for name, (value, low) in lowest.items() if value < low]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _vocab_size(checkpoint: Path) -> int:
    path = checkpoint / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(
            f"{path} is not the config of a TensorRT-LLM checkpoint: {type(error).__name__}: {error}",
            hint="python -m pipeline checkpoint inspect shows what a folder holds",
        ) from error


def _flag(value: bool) -> str:
    return "true" if value else "false"
