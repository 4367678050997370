"""compose.yaml for a job: Triton and the frontend on the images of its toolchain."""

from __future__ import annotations

from pipeline import __version__
from pipeline.config.spec import Spec
from pipeline.triton.compose import FrontendService, compose_text
from pipeline.triton.placement import PlacedEngine, Placement, plan_servers


def compose_file(spec: Spec, placement: Placement | None = None) -> str:
    """Return the text of compose.yaml. The model repository is mounted at ``/models``, everything read-only.

    Args:
        spec: The job.
        placement: Where the engines run; None takes the first GPUs. Only for ``target=engine``.
    """
    frontend = FrontendService(
        image=f"trtllm-pipeline-frontend:{__version__}",
        model=spec.frontend.model,
        tool_parser=spec.frontend.tool_parser,
    )
    plan = None
    if spec.target.resolved == "engine":
        plan = plan_servers([PlacedEngine("tensorrt_llm", spec.parallel.world_size, placement or Placement())])
    return compose_text(name=spec.name, serve_image=spec.toolchain.serve_image, frontend=frontend, plan=plan)
