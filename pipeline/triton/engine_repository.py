"""Emit a repository for TensorRT engines: one or several engines, each with its text models.

Layout for one engine; with a name, every folder ends in ``_<name>``::

    tensorrt_llm/        config.pbtxt  1/ config.json, rank*.engine
    tensorrt_llm_draft/  config.pbtxt  1/ likewise, where a draft engine is given
    preprocessing/       config.pbtxt  1/ model.py, tokenizer/
    postprocessing/      config.pbtxt  1/ model.py, tokenizer/
    ensemble/            config.pbtxt  1/ (empty but for a note)
    tensorrt_llm_bls/    config.pbtxt  1/ model.py
    launch.sh            starts the servers, inside the serve image
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, Finding, SourceError
from pipeline.facts.shipped import shipped
from pipeline.triton.engine_facts import EngineFacts, read_engine_facts
from pipeline.triton.engine_models import ModelNames, backend_for, bls_config, engine_ensemble, llm_config
from pipeline.triton.engine_rules import draft_findings, engine_findings, sharing_findings
from pipeline.triton.engine_serving import EngineServing
from pipeline.triton.guided_tokenizer import FILE as TOKENIZER_INFO
from pipeline.triton.guided_tokenizer import write_tokenizer_info
from pipeline.triton.launch import launch_script
from pipeline.triton.layout import (
    LAYOUT_VERSION,
    MOUNT_POINT,
    STAMP,
    VERSION_FOLDER,
    copy_tokenizer,
    copy_tree,
    link_or_copy,
)
from pipeline.triton.model_config import ModelConfig, write_config
from pipeline.triton.placement import PlacedEngine, ServerPlan, plan_servers
from pipeline.triton.special_ids import read_special_ids
from pipeline.triton.text_models import text_configs

if TYPE_CHECKING:
    from pipeline.triton.repository import RepositorySettings

LAUNCH_SCRIPT = "launch.sh"
_TAKEN = ("bls", "draft")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One engine and how it is served.

    Attributes:
        engine: Folder with ``config.json`` and ``rank*.engine``; hard-linked where possible.
        tokenizer: ``tokenizer.json`` and its companions; copied.
        settings: Shared values; ``settings.serving`` has those of the engine.
        name: Tells this engine from others of the repository; empty for the first.
        draft: Folder of the engine that drafts for this one; None for none.
        draft_serving: How the draft engine is served; its placement counts.
    """

    engine: Path
    tokenizer: Path
    settings: RepositorySettings
    name: str = ""
    draft: Path | None = None
    draft_serving: EngineServing = field(default_factory=EngineServing)

    @property
    def names(self) -> ModelNames:
        """Names of the models."""
        return ModelNames(self.name)

    @property
    def serving(self) -> EngineServing:
        """Settings of the engine."""
        return self.settings.serving or EngineServing()

    def engines(self) -> list[tuple[str, Path, EngineServing]]:
        """Return model name, folder and settings of the engine and of the draft."""
        found = [(self.names.of("tensorrt_llm"), self.engine, self.serving)]
        if self.draft is not None:
            found.append((self.names.of("tensorrt_llm_draft"), self.draft, self.draft_serving))
        return found


def emit_engines(out: Path, models: Sequence[EngineModel]) -> ServerPlan:
    """Write a repository with several engines.

    Args:
        out: Folder to create; must be empty or absent.
        models: At least one; names differ.

    Returns:
        The servers that the repository needs.

    Raises:
        ConfigError: A setting is impossible or above what an engine was built for; both values are named.
        SourceError: An input is missing or damaged.
    """
    _check_names(models)
    facts = {name: read_engine_facts(folder) for model in models for name, folder, _ in model.engines()}
    plan = plan_servers(
        [
            PlacedEngine(name, facts[name].world_size, serving.placement)
            for model in models
            for name, _, serving in model.engines()
        ]
    )
    configs = {model.name: engine_configs(model, facts, plan) for model in models}
    _refuse(models, configs, facts)
    for model in models:
        _write(out, model, configs[model.name], facts)
    script = out / LAUNCH_SCRIPT
    script.write_text(launch_script(plan), encoding="utf-8")
    script.chmod(0o755)
    return plan


def engine_configs(model: EngineModel, facts: Mapping[str, EngineFacts], plan: ServerPlan) -> dict[str, ModelConfig]:
    """Return the configs of one engine's models by name.

    Args:
        model: The engine.
        facts: Of each engine model by name.
        plan: Where they run.
    """
    names, settings, serving = model.names, model.settings, model.serving
    own = facts[names.of("tensorrt_llm")]
    backend = backend_for(own)
    batch, decoupled = settings.max_batch_size, settings.decoupled
    configs = {
        name: llm_config(
            name,
            serving=engine_serving,
            facts=facts[name],
            plan=plan,
            max_batch_size=min(batch, facts[name].max_batch_size) if engine_serving is not serving else batch,
            decoupled=decoupled,
            exclude_input=settings.exclude_input_in_output,
            mount_point=MOUNT_POINT,
        )
        for name, _, engine_serving in model.engines()
    }
    configs |= text_configs(
        settings,
        read_special_ids(model.tokenizer),
        own.vocab_size,
        preprocessing=names.of("preprocessing"),
        postprocessing=names.of("postprocessing"),
    )
    ensemble = engine_ensemble(names, backend, max_batch_size=batch, decoupled=decoupled)
    draft = facts.get(names.of("tensorrt_llm_draft"))
    bls = bls_config(names, backend, serving, target=own, draft=draft, max_batch_size=batch, decoupled=decoupled)
    configs |= {ensemble.name: ensemble, bls.name: bls}
    for config in configs.values():
        config.parameters[STAMP].string_value = f"engine/{own.release}/{LAYOUT_VERSION}"
    return configs


def _refuse(
    models: Sequence[EngineModel], configs: Mapping[str, Mapping[str, ModelConfig]], facts: Mapping[str, EngineFacts]
) -> None:
    found: list[Finding] = []
    for model in models:
        settings = model.settings
        for name, folder, serving in model.engines():
            found += [replace(item, path=f"{name}: {item.path}") for item in serving.findings()]
            found += engine_findings(configs[model.name][name], facts[name], folder)
        own = facts[model.names.of("tensorrt_llm")]
        if settings.max_seq_len > own.max_seq_len:
            message = f"max_seq_len is {settings.max_seq_len}, the engine was built for {own.max_seq_len}"
            found.append(Finding("engine-limits", "error", "max_seq_len", message, "lower it, or build again"))
        if settings.release and settings.release != own.release:
            message = f"the serve image has TensorRT-LLM {settings.release}, the engine was built by {own.release}"
            found.append(Finding("engine-release", "error", "release", message, "build and serve with one release"))
        if model.draft is not None:
            bls = model.serving.bls
            draft = facts[model.names.of("tensorrt_llm_draft")]
            found += draft_findings(own, draft, draft_tokens=bls.draft_tokens, use_logits=bls.use_draft_logits)
    engines = {name: configs[model.name][name] for model in models for name, _, _ in model.engines()}
    found += sharing_findings(engines)
    errors = [item for item in found if item.severity == "error"]
    if errors:
        raise ConfigError("; ".join(item.message for item in errors), findings=found)


def _check_names(models: Sequence[EngineModel]) -> None:
    names = [model.name for model in models]
    for name in names:
        if name and (not re.fullmatch(r"[A-Za-z0-9]\w*", name) or name.split("_")[0] in _TAKEN):
            raise ConfigError(
                f"the engine's name is {name!r}, expected letters, digits, '_', '.', '-', not bls or draft"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"a repository needs engines with different names, it has {names}")
    for model in models:
        if not (model.tokenizer / "tokenizer.json").is_file():
            raise SourceError(f"{model.tokenizer} has no tokenizer.json; without it text cannot become tokens")


def _write(out: Path, model: EngineModel, configs: Mapping[str, ModelConfig], facts: Mapping[str, EngineFacts]) -> None:
    templates = shipped("triton_repo")
    folders = {
        "preprocessing": templates / "reference" / "preprocessing",
        "postprocessing": templates / "reference" / "postprocessing",
        "ensemble": templates / "reference" / "ensemble",
        "tensorrt_llm_bls": templates / "engine" / "tensorrt_llm_bls",
    }
    for name, config in configs.items():
        write_config(out / name, config)
    for role, template in folders.items():
        copy_tree(template / VERSION_FOLDER, out / model.names.of(role) / VERSION_FOLDER)
    for name, folder, _ in model.engines():
        target = out / name / VERSION_FOLDER
        target.mkdir(parents=True, exist_ok=True)
        wanted = ["config.json", *(f"rank{rank}.engine" for rank in range(facts[name].world_size))]
        for file in wanted:
            link_or_copy(folder / file, target / file)
    for name, _, serving in model.engines():
        if serving.guided.backend and not serving.guided.tokenizer_info_path:
            path = out / name / VERSION_FOLDER / TOKENIZER_INFO
            write_tokenizer_info(model.tokenizer, read_special_ids(model.tokenizer), path)
    for role in ("preprocessing", "postprocessing"):
        copy_tokenizer(model.tokenizer, out / model.names.of(role) / VERSION_FOLDER)
