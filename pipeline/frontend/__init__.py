"""The OpenAI-compatible server in front of Triton.

``create_app`` and ``serve`` load the web framework, so they are imported when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.frontend.settings import FrontendSettings

if TYPE_CHECKING:
    from pipeline.frontend.app import create_app
    from pipeline.frontend.server import serve

__all__ = ["FrontendSettings", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from pipeline.frontend.app import create_app

        return create_app
    if name == "serve":
        from pipeline.frontend.server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
