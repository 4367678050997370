from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from pipeline.config.identity import STAGES, identity, unmarked_fields
from pipeline.config.spec import Spec


def test_every_field_of_spec_is_marked() -> None:
    assert list(unmarked_fields(Spec)) == []


def test_unmarked_field_is_named_with_its_path() -> None:
    names = list(unmarked_fields(_Outer))
    assert names == ["inner.bare", "plain"]


def test_identity_refuses_an_unknown_stage() -> None:
    with pytest.raises(ValueError, match="no such stage"):
        identity("built")


def test_stages_are_in_pipeline_order() -> None:
    assert STAGES == ("fetch", "convert", "build", "baseline", "validate", "emit", "verify")


@dataclass(frozen=True)
class _Inner:
    marked: int = field(metadata=identity("build"))
    bare: int


@dataclass(frozen=True)
class _Outer:
    inner: _Inner
    plain: str
    whole: dataclasses.Field[int] | None = field(metadata=identity())
