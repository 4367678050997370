"""Engines of an emitted repository against what they were built for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pipeline.errors import PipelineError
from pipeline.triton.emitted import Findings, Repository, fault
from pipeline.triton.engine_facts import EngineFacts, read_engine_facts
from pipeline.triton.engine_models import BACKEND
from pipeline.triton.engine_rules import draft_findings, engine_findings, sharing_findings
from pipeline.triton.layout import MOUNT_POINT, STAMP, VERSION_FOLDER
from pipeline.triton.model_config import CONFIG_FILE, parameters_of


def check_engines(repository: Repository) -> Findings:
    """Check each engine against what it was built for, and the draft engines against theirs."""
    facts: dict[str, EngineFacts] = {}
    for name, config in (*repository.role("tensorrt_llm"), *repository.role("tensorrt_llm_draft")):
        if config.backend != BACKEND:
            continue
        folder = repository.version(name)
        try:
            facts[name] = read_engine_facts(folder)
        except PipelineError as error:
            yield fault("engine-files", f"{name}/{VERSION_FOLDER}/config.json", error.message)
            continue
        for finding in engine_findings(config, facts[name], folder):
            place = finding.path if "/" in finding.path else f"{name}/{CONFIG_FILE}"
            yield dataclasses.replace(finding, path=place)
        parameters = parameters_of(config)
        wanted = f"{MOUNT_POINT}/{name}/{VERSION_FOLDER}"
        if parameters.get("gpt_model_path") != wanted:
            message = f"gpt_model_path is {parameters.get('gpt_model_path')!r}, the engine will be at {wanted}"
            yield fault("engine-path", f"{name}/{CONFIG_FILE}", message)
        info = parameters.get("xgrammar_tokenizer_info_path", "")
        if parameters.get("guided_decoding_backend") and not repository.has_mounted(info):
            message = f"guided decoding reads {info or 'xgrammar_tokenizer_info_path, which is empty'}; it is not here"
            yield fault("guided-decoding", f"{name}/{CONFIG_FILE}", message)
        stamp = parameters.get(STAMP, "").split("/")
        if stamp[:1] == ["engine"] and stamp[1:2] != [facts[name].release]:
            message = f"emitted for TensorRT-LLM {'/'.join(stamp[1:2])}, the engine was built by {facts[name].release}"
            yield fault("engine-release", f"{name}/{CONFIG_FILE}", message)
    for finding in sharing_findings({name: repository.configs[name] for name in facts}):
        yield dataclasses.replace(finding, path=f"{finding.path}/{CONFIG_FILE}")
    yield from _check_bls(repository, facts)


def _check_bls(repository: Repository, facts: Mapping[str, EngineFacts]) -> Findings:
    for name, config in repository.role("tensorrt_llm_bls"):
        place = f"{name}/{CONFIG_FILE}"
        parameters = parameters_of(config)
        for key in sorted(key for key in parameters if key.endswith("_model_name")):
            if parameters[key] and parameters[key] not in repository.configs:
                yield fault("bls-model", place, f"{key} is {parameters[key]!r}, which has no model with a valid config")
        target = facts.get(parameters.get("tensorrt_llm_model_name", ""))
        draft = facts.get(parameters.get("tensorrt_llm_draft_model_name", ""))
        if target is not None and draft is not None:
            asked = parameters.get("num_draft_tokens", "")
            yield from (
                dataclasses.replace(finding, path=place)
                for finding in draft_findings(
                    target,
                    draft,
                    draft_tokens=int(asked) if asked.isdecimal() else 0,
                    use_logits=parameters.get("use_draft_logits") == "true",
                )
            )
