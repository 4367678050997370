"""What the reference engine refuses, as an error of this program.

The engine stands alone, so that its folder can be copied into a model repository; it does not know our errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import SourceError


@contextmanager
def engine_faults() -> Iterator[None]:
    """Raise :class:`SourceError` in place of the engine's own error."""
    from pipeline.engines.reference import EngineError

    try:
        yield
    except EngineError as error:
        raise SourceError(
            f"the reference engine cannot run this model: {error}",
            hint="it runs what pipeline/engines/reference names; a GPU target may still build it: target=engine",
        ) from error
