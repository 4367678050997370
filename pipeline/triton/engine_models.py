"""The configs of a repository for engines: ``tensorrt_llm`` in the C++ backend, ``ensemble``, ``tensorrt_llm_bls``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.triton import tensors
from pipeline.triton.engine_backend import EngineBackend, engine_backend
from pipeline.triton.engine_facts import EngineFacts
from pipeline.triton.engine_serving import WORKER, EngineServing, parameter_text
from pipeline.triton.guided_tokenizer import FILE as TOKENIZER_INFO
from pipeline.triton.model_config import ModelConfig, ensemble_of, new_config, python_model
from pipeline.triton.placement import ServerPlan
from pipeline.triton.tensors import Tensor

BACKEND = "tensorrtllm"
_CONTEXT_LOGITS = ("return_context_logits", "context_logits")
# A draft is made inside the text model, which takes these in addition to what an ensemble takes.
BLS_INPUTS = (Tensor("num_draft_tokens", "INT32"), Tensor("use_draft_logits", "BOOL"))


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of the models that belong to one engine; all end alike when a repository has several engines."""

    suffix: str = ""

    def of(self, role: str) -> str:
        """Return the name of a role: ``tensorrt_llm``, ``preprocessing``, ``tensorrt_llm_draft`` …."""
        return f"{role}_{self.suffix}" if self.suffix else role


def backend_for(facts: EngineFacts) -> EngineBackend:
    """Return tensors and parameters for an engine: those of its release, less the logits that it does not gather.

    A client reads the config and so finds out that prompts cannot be scored; asking the engine all the same has been
    seen to end the server.
    """
    backend = engine_backend(facts.release, logits=facts.logits, prompt_table=facts.dtype)
    if facts.context_logits:
        return backend
    return EngineBackend(
        release=backend.release,
        inputs=tuple(tensor for tensor in backend.inputs if tensor.name not in _CONTEXT_LOGITS),
        outputs=tuple(tensor for tensor in backend.outputs if tensor.name not in _CONTEXT_LOGITS),
        parameters=backend.parameters,
        must_exist=backend.must_exist,
        left_out=backend.left_out,
    )


def llm_config(
    name: str,
    *,
    serving: EngineServing,
    facts: EngineFacts,
    plan: ServerPlan,
    max_batch_size: int,
    decoupled: bool,
    exclude_input: bool,
    mount_point: str,
) -> ModelConfig:
    """Return the config of an engine.

    Args:
        name: Name of the model.
        serving: Settings.
        facts: Of the engine.
        plan: Where it runs.
        max_batch_size: Rows that one request may have, and requests that Triton hands over together.
        decoupled: Whether a request may get several responses.
        exclude_input: Answers without streaming leave out the prompt.
        mount_point: Where the server sees the repository.
    """
    backend = backend_for(facts)
    config = new_config(name, backend.inputs, backend.outputs, max_batch_size)
    config.backend = BACKEND
    config.model_transaction_policy.decoupled = decoupled
    # Which GPUs an instance uses is decided by gpu_device_ids; the backend ignores GPU lists of instance groups.
    config.instance_group.add(kind="KIND_CPU", count=plan.instances[name])
    batching = config.dynamic_batching
    batching.preferred_batch_size.append(max_batch_size)
    batching.max_queue_delay_microseconds = serving.batching.max_queue_delay_us
    batching.default_queue_policy.max_queue_size = serving.batching.max_queue_size
    derived = {
        "gpt_model_path": f"{mount_point}/{name}/1",
        "exclude_input_in_output": parameter_text(exclude_input),
        "gpu_device_ids": "" if plan.nodes > 1 else plan.device_ids[name],
        "num_nodes": str(plan.nodes),
        "executor_worker_path": WORKER if plan.mode == "orchestrator" else "",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    }
    if serving.guided.backend and not serving.guided.tokenizer_info_path:
        derived["xgrammar_tokenizer_info_path"] = f"{mount_point}/{name}/1/{TOKENIZER_INFO}"
    values = {**_setting_texts(serving, facts), **{key: value for key, value in derived.items() if value}}
    for key in sorted(values.keys() & backend.parameters):
        config.parameters[key].string_value = values[key]
    for key in sorted(backend.must_exist - values.keys()):
        config.parameters[key].string_value = ""
    return config


def _setting_texts(serving: EngineServing, facts: EngineFacts) -> dict[str, str]:
    """Return parameters by name; None and empty values are left out, what follows from the engine is filled in."""
    filled = {
        "kv_cache.reuse": facts.paged_context_fmha,
        "batching.chunked_context": facts.paged_context_fmha,
        "decoding.mode": decoding_mode(serving, facts),
    }
    texts = {}
    for name, metadata, value in serving.settings():
        chosen = filled[name] if value is None and name in filled else value
        if "parameter" in metadata and chosen not in (None, "", ()):
            texts[metadata["parameter"]] = parameter_text(chosen)
    return texts


def decoding_mode(serving: EngineServing, facts: EngineFacts) -> str:
    """Return the decoding mode that fits an engine."""
    by_engine = {
        "medusa": "medusa",
        "lookahead_decoding": "lookahead",
        "explicit_draft_tokens": "redrafter",
        "eagle": "eagle",
    }
    plain = "top_k_top_p" if serving.decoding.max_beam_width == 1 else "beam_search"
    return by_engine.get(facts.speculative, plain)


def text_inputs(backend: EngineBackend) -> tuple[dict[str, str], list[Tensor]]:
    """Return what a text model calls the engine's inputs, and its own inputs as tensors, for one release."""
    llm = {tensor.name: tensor for tensor in backend.inputs}
    renamed = {"min_length": "min_length", "random_seed": "random_seed"}  # up to 0.19; the newer names are in the table
    to_llm = {ours: theirs for ours, theirs in {**tensors.ENSEMBLE_TO_LLM, **renamed}.items() if theirs in llm}
    preprocessing = {tensor.name: tensor for tensor in tensors.PREPROCESSING_INPUTS}
    inputs = [_plain(ours, preprocessing[theirs]) for ours, theirs in tensors.ENSEMBLE_TO_PREPROCESSING.items()]
    return to_llm, inputs + [_plain(ours, llm[theirs]) for ours, theirs in to_llm.items()]


def text_outputs(backend: EngineBackend) -> list[Tensor]:
    """Return the outputs of a text model."""
    hidden = {"output_ids", "sequence_length", "context_phase_params"}
    return [Tensor("text_output", "STRING", (-1,)), *(t for t in backend.outputs if t.name not in hidden)]


def engine_ensemble(names: ModelNames, backend: EngineBackend, *, max_batch_size: int, decoupled: bool) -> ModelConfig:
    """Return the config of the ensemble. It has no input ``stream``.

    The backend's answers do not say which tokens came before, so an ensemble cannot make text of a stream without
    losing blanks and cutting characters. A request that asks for a stream is refused by name.
    """
    to_llm, inputs = text_inputs(backend)
    without_stream = [tensor for tensor in inputs if tensor.name != "stream"]
    to_postprocessing = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}
    outputs = text_outputs(backend)
    return ensemble_of(
        names.of("ensemble"),
        inputs=without_stream,
        outputs=outputs,
        max_batch_size=max_batch_size,
        decoupled=decoupled,
        steps=(
            (
                names.of("preprocessing"),
                {theirs: ours for ours, theirs in tensors.ENSEMBLE_TO_PREPROCESSING.items()},
                {name: f"_{name}" for name in tensors.PREPROCESSING_TO_LLM},
            ),
            (
                names.of("tensorrt_llm"),
                {
                    **{theirs: f"_{name}" for name, theirs in tensors.PREPROCESSING_TO_LLM.items()},
                    **{theirs: ours for ours, theirs in to_llm.items() if ours != "stream"},
                },
                {
                    **{name: f"_{name}" for name in to_postprocessing},
                    **{tensor.name: tensor.name for tensor in outputs[1:]},
                },
            ),
            (
                names.of("postprocessing"),
                {theirs: f"_{name}" for name, theirs in to_postprocessing.items()},
                {"OUTPUT": "text_output"},
            ),
        ),
    )


def bls_config(
    names: ModelNames,
    backend: EngineBackend,
    serving: EngineServing,
    *,
    target: EngineFacts,
    draft: EngineFacts | None,
    max_batch_size: int,
    decoupled: bool,
) -> ModelConfig:
    """Return the config of the text model in Python. One instance works on many requests at the same time."""
    to_llm, inputs = text_inputs(backend)
    drafts = {}
    if draft is not None:
        drafts = {
            "tensorrt_llm_draft_model_name": names.of("tensorrt_llm_draft"),
            "num_draft_tokens": str(serving.bls.draft_tokens),
            "max_draft_tokens": str(target.max_draft_len),
            "use_draft_logits": parameter_text(serving.bls.use_draft_logits),
            # Building for drafts lengthens the sequence by one draft, which is no room for text.
            "max_seq_len": str(min(target.max_seq_len - target.max_draft_len, draft.max_seq_len)),
        }
    parameters = {
        "tensorrt_llm_model_name": names.of("tensorrt_llm"),
        "preprocessing_model_name": names.of("preprocessing"),
        "postprocessing_model_name": names.of("postprocessing"),
        "concurrency": str(serving.bls.concurrency),
        "engine_inputs": ",".join(f"{ours}:{theirs}" for ours, theirs in sorted(to_llm.items()) if ours != "stream"),
        **drafts,
    }
    return python_model(
        names.of("tensorrt_llm_bls"),
        inputs=[*inputs, *(BLS_INPUTS if draft is not None else ())],
        outputs=text_outputs(backend),
        max_batch_size=max_batch_size,
        decoupled=decoupled,
        parameters=parameters,
    )


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a text model: the same values, nothing of how the engine's backend takes them."""
    return Tensor(name, tensor.datatype, tensor.dims, tensor.optional)


def instance_ids(config: ModelConfig) -> list[list[int]]:
    """Return the GPU positions of each instance, from a config's ``gpu_device_ids``.

    Raises:
        ValueError: The parameter is no list of numbers.
    """
    text: Any = config.parameters["gpu_device_ids"].string_value if "gpu_device_ids" in config.parameters else ""
    return [[int(part) for part in group.split(",")] for group in text.split(";") if group]
