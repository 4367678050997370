from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_graph import Toy, ToyStage

from pipeline.store.store import Store


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(
        Store(tmp_path / "store"),
        SimpleNamespace(name="toy"),
        ToyStage("fetch", text="model"),
        ToyStage("convert", ("fetch",), "converted"),
        ToyStage("emit", ("fetch", "convert"), "emitted"),
    )
