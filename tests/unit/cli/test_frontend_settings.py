"""Every setting of the frontend can be reached from the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.cli.serve import _operation
from pipeline.config.compose import compose
from pipeline.config.schema import FrontendConfig
from pipeline.frontend.settings import FrontendSettings

# What the emitted artefact or the model's own configuration says.
_DERIVED = {"target", "created", "max_seq_len", "vocab_size", "clean_up_spaces"}


def test_every_setting_has_a_key_and_the_same_default() -> None:
    keys = {field.name for field in dataclasses.fields(FrontendConfig)}
    settings = {field.name for field in dataclasses.fields(FrontendSettings)}
    assert settings - keys == _DERIVED and keys <= settings
    values = _operation(compose(["target=reference"]))
    plain = FrontendSettings(tokenizer=Path("x"))
    assert {name: getattr(plain, name) for name in values} == values


def test_keys_become_settings() -> None:
    overrides = ["frontend.lora.sql=1", "frontend.lora_weights.sql=/adapters/sql", "frontend.api_keys_file=/etc/keys"]
    values = _operation(compose(["target=reference", *overrides, "frontend.max_in_flight=3"]))
    settings = FrontendSettings(tokenizer=Path("x"), **values)
    assert settings.lora == {"sql": 1} and settings.lora_weights == {"sql": Path("/adapters/sql")}
    assert settings.api_keys_file == Path("/etc/keys") and settings.max_in_flight == 3
