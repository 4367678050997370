"""Serving settings that follow from a job: what the engine was built for decides how it is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.spec import Spec
from pipeline.triton.engine_serving import EngineServing, serving_from_options
from pipeline.triton.placement import Placement


def serving_from_spec(
    spec: Spec, options: Mapping[str, Any] | None = None, *, placement: Placement | None = None
) -> EngineServing:
    """Return the settings of a job's engine.

    Args:
        spec: The job.
        options: Settings by dotted name, as people write them; they win.
        placement: Where the engine runs; None takes the first GPUs.

    Raises:
        ConfigError: An option does not exist, belongs to the builder, or has the wrong type.
    """
    derived: dict[str, Any] = {"decoding.max_beam_width": spec.limits.max_beam_width}
    speculative = spec.speculative
    if speculative is not None and speculative.mode == "lookahead":
        derived["decoding.lookahead_window"] = speculative.window
        derived["decoding.lookahead_ngram"] = speculative.ngram
        derived["decoding.lookahead_verification"] = speculative.verification
    if spec.lora is not None:
        derived["lora.max_rank"] = spec.lora.max_rank
        derived["lora.optimal_rank"] = spec.lora.adapter_rank or spec.lora.max_rank
    return serving_from_options({**derived, **(options or {})}, placement=placement)
