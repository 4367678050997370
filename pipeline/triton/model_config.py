"""Build and read ``config.pbtxt`` through Triton's own ModelConfig protobuf.

The protobuf module is loaded on first use: it takes a quarter of a second, and planning does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError
from pipeline.triton import tensors
from pipeline.triton.tensors import Tensor

CONFIG_FILE = "config.pbtxt"

# A generated message class without type information.
ModelConfig = Any
# Model, its inputs and outputs by the names they have in it, and what the ensemble calls them.
Step = tuple[str, Mapping[str, str], Mapping[str, str]]


def python_model(
    name: str,
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    max_batch_size: int,
    instances: int = 1,
    decoupled: bool = False,
    parameters: Mapping[str, str] | None = None,
) -> ModelConfig:
    """Return the config of a model of the python backend on the CPU.

    Args:
        name: Model and folder name.
        inputs: Inputs, in order.
        outputs: Outputs, in order.
        max_batch_size: Rows one request may hold; at least 1, or the batch dimension disappears.
        instances: Processes that run the model.
        decoupled: Whether a request may get any number of responses.
        parameters: String parameters of the model.
    """
    pb = _protobuf()
    config = new_config(name, inputs, outputs, max_batch_size)
    config.backend = "python"
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=instances)
    config.model_transaction_policy.decoupled = decoupled
    for key, value in (parameters or {}).items():
        config.parameters[key].string_value = value
    return config


def ensemble_model(*, max_batch_size: int, decoupled: bool) -> ModelConfig:
    """Return the config of ``ensemble``: text in, text out through the other three models.

    Args:
        max_batch_size: As in the three models.
        decoupled: As in ``tensorrt_llm``.
    """
    llm_outputs = {tensor.name: tensor for tensor in tensors.LLM_OUTPUTS}
    text_output = Tensor("text_output", "STRING", (-1,))
    outputs = [text_output, *(llm_outputs[name] for name in tensors.ENSEMBLE_PASSED_OUTPUTS)]
    internal = {name: f"_{name}" for name in (*tensors.PREPROCESSING_TO_LLM, *tensors.LLM_TO_POSTPROCESSING)}
    return ensemble_of(
        "ensemble",
        inputs=_ensemble_inputs(),
        outputs=outputs,
        max_batch_size=max_batch_size,
        decoupled=decoupled,
        steps=(
            (
                "preprocessing",
                {theirs: ours for ours, theirs in tensors.ENSEMBLE_TO_PREPROCESSING.items()},
                {name: internal[name] for name in tensors.PREPROCESSING_TO_LLM},
            ),
            (
                "tensorrt_llm",
                {
                    **{theirs: internal[name] for name, theirs in tensors.PREPROCESSING_TO_LLM.items()},
                    **{theirs: ours for ours, theirs in tensors.ENSEMBLE_TO_LLM.items()},
                },
                {
                    **{name: internal[name] for name in tensors.LLM_TO_POSTPROCESSING},
                    **{name: name for name in tensors.ENSEMBLE_PASSED_OUTPUTS},
                },
            ),
            (
                "postprocessing",
                {theirs: internal[name] for name, theirs in tensors.LLM_TO_POSTPROCESSING.items()},
                {"OUTPUT": "text_output"},
            ),
        ),
    )


def ensemble_of(
    name: str,
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    max_batch_size: int,
    decoupled: bool,
    steps: Sequence[Step],
) -> ModelConfig:
    """Return the config of an ensemble.

    Args:
        name: Model and folder name.
        inputs: Inputs, in order.
        outputs: Outputs, in order.
        max_batch_size: As in the models of the steps.
        decoupled: As in those models that are.
        steps: Model, its inputs and its outputs, each by what the ensemble calls the tensor.
    """
    config = new_config(name, inputs, outputs, max_batch_size)
    config.platform = "ensemble"
    config.model_transaction_policy.decoupled = decoupled
    for model, step_inputs, step_outputs in steps:
        step = config.ensemble_scheduling.step.add(model_name=model, model_version=-1)
        for theirs, ours in step_inputs.items():
            step.input_map[theirs] = ours
        for theirs, ours in step_outputs.items():
            step.output_map[theirs] = ours
    return config


def write_config(folder: Path, config: ModelConfig) -> None:
    """Write ``config`` as ``folder/config.pbtxt``."""
    from google.protobuf import text_format

    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(text_format.MessageToString(config), encoding="utf-8")


def read_config(path: Path) -> ModelConfig:
    """Read a ``config.pbtxt`` as Triton does.

    Raises:
        SourceError: The file is missing or is not a ModelConfig; says line and column.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), _protobuf().ModelConfig())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text") from error
    except text_format.ParseError as error:
        raise SourceError(f"{path} does not parse as a Triton model config: {error}") from error


def parameters_of(config: ModelConfig) -> dict[str, str]:
    """Return the string parameters of a config."""
    return {key: value.string_value for key, value in config.parameters.items()}


def datatype_name(value: int) -> str:
    """Return the name of a datatype in a config, ``TYPE_INT32``."""
    return str(_protobuf().DataType.Name(value))


def _ensemble_inputs() -> list[Tensor]:
    preprocessing = {tensor.name: tensor for tensor in tensors.PREPROCESSING_INPUTS}
    llm = {tensor.name: tensor for tensor in tensors.LLM_INPUTS}
    renamed = [(ours, preprocessing[theirs]) for ours, theirs in tensors.ENSEMBLE_TO_PREPROCESSING.items()]
    renamed += [(ours, llm[theirs]) for ours, theirs in tensors.ENSEMBLE_TO_LLM.items()]
    return [Tensor(ours, tensor.datatype, tensor.dims, tensor.optional) for ours, tensor in renamed]


def new_config(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], max_batch_size: int) -> ModelConfig:
    """Return a config with tensors and nothing else."""
    pb = _protobuf()
    config = pb.ModelConfig(name=name, max_batch_size=max_batch_size)
    for tensor in inputs:
        datatype = pb.DataType.Value(f"TYPE_{tensor.datatype}")
        added = config.input.add(name=tensor.name, data_type=datatype, dims=tensor.dims, optional=tensor.optional)
        if tensor.reshape:
            added.reshape.SetInParent()  # an empty shape: the row's only value
        added.allow_ragged_batch = tensor.ragged
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"), dims=tensor.dims)
    return config


def _protobuf() -> Any:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2
