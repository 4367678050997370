"""What can be told about the stages before they run, besides the rules of the configuration."""

from __future__ import annotations

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.gate.available import transformers_available


def foresee(spec: Spec) -> list[Finding]:
    """Warn when the gate will have no witness but the conversion it is to judge.

    The wheel's model has recorded values; any other needs transformers, or a precision that differs from the source's.
    """
    independent = spec.source.wheel is not None or spec.gate.baseline_python or transformers_available()
    quantized = spec.precision.quant_algo or spec.precision.kv_cache
    if spec.target.resolved != "reference" or quantized or (independent and spec.gate.baseline != "unquantized"):
        return []
    message = (
        "no witness but the unquantized conversion: the verdict will say nothing about the conversion itself, "
        f"and if the source is {spec.precision.dtype} already, it will be invalid (exit 4)"
    )
    hint = (
        "gate.baseline_python=PYTHON with torch and transformers (extra `oracle`), or precision=fp16 of a bf16 source"
    )
    return [Finding("gate-no-witness", "warning", "gate.baseline", message, hint)]
