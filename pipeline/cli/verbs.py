"""The verbs: what exists, what it is for, where its code is. Loading this table loads no verb."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.cli.output import Output

if TYPE_CHECKING:
    from pipeline.config.spec import Spec


@dataclass(frozen=True, slots=True)
class Request:
    """What a recipe verb is asked for.

    Attributes:
        arguments: Overrides, as typed.
        output: Where to write.
        config_dir: Of ``--config-dir``.
        is_sweep: ``-m`` was given.
    """

    arguments: tuple[str, ...]
    output: Output
    config_dir: Path | None = None
    is_sweep: bool = False

    def spec(self) -> Spec:
        """Return the job that the overrides mean.

        Raises:
            ConfigError: With one finding per mistake.
        """
        from pipeline.config.compose import compose

        spec = compose(self.arguments, config_dir=self.config_dir)
        if spec.target.resolved == "engine":
            from pipeline.toolchains.from_spec import settled

            spec = settled(spec)
        gc.enable()  # main() turned it off for the start
        return spec


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        name: What is typed.
        help: One line.
        location: ``module:function``. Recipe verbs: ``function(Request) -> int``. File verbs: ``function(args, output)
            -> int``, beside it ``function_arguments(parser)``.
        kind: ``recipe`` verbs take overrides, ``file`` verbs take flags.
        examples: Complete command lines behind ``python -m pipeline``.
    """

    name: str
    help: str
    location: str
    kind: Literal["recipe", "file"]
    examples: Sequence[str]


VERBS: tuple[Verb, ...] = (
    Verb(
        "run",
        "the whole pipeline: fetch, convert, build, validate, emit, verify (also without a verb); -m sweeps",
        "pipeline.cli.run:main",
        "recipe",
        ("run", "model=smollm2 precision=fp16", "run -m precision=bf16,fp16"),
    ),
    Verb(
        "plan",
        "what a run would do and whether it can work: findings, memory, hits and misses; changes nothing",
        "pipeline.cli.plan:main",
        "recipe",
        ("plan", "plan model=llama2 precision=fp8 hardware=h100_80g", "plan --json model=llama3_405b parallel=tp8"),
    ),
    Verb(
        "serve",
        "serve what run made: Triton and the OpenAI frontend, until ctrl-C",
        "pipeline.cli.serve:serve",
        "recipe",
        ("serve", "serve frontend.port=9000"),
    ),
    Verb(
        "frontend",
        "the OpenAI frontend alone, in front of running Triton servers",
        "pipeline.cli.serve:frontend",
        "recipe",
        ("frontend frontend.triton=[localhost:8001] frontend.port=8000 frontend.tokenizer=dist/NAME/tokenizer",),
    ),
    Verb(
        "frontend-check",
        "hold any OpenAI server against the text contract: stream, stop, counts, echo, errors",
        "pipeline.cli.frontend_check:frontend_check",
        "file",
        ("frontend-check http://localhost:8000", "frontend-check URL --model NAME --json"),
    ),
    Verb(
        "checkpoint",
        "convert, inspect, diff and verify checkpoints by themselves",
        "pipeline.cli.files:checkpoint",
        "file",
        ("checkpoint convert SRC OUT --dtype bfloat16", "checkpoint inspect OUT", "checkpoint diff A B"),
    ),
    Verb(
        "store",
        "list, explain, check and clean the artefact store",
        "pipeline.cli.files:store",
        "file",
        ("store ls", "store show KEY", "store verify", "store gc"),
    ),
    Verb(
        "report",
        "the judgement of a result, and where its page is",
        "pipeline.cli.files:report",
        "file",
        ("report dist/NAME", "report dist/NAME --out DIR"),
    ),
    Verb(
        "compare",
        "what differs between two results: measures and manifests",
        "pipeline.cli.files:compare",
        "file",
        ("compare dist/A dist/B",),
    ),
)


def find(name: str) -> Verb | None:
    """Return the verb of that name."""
    return next((verb for verb in VERBS if verb.name == name), None)
