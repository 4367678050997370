from __future__ import annotations

import pytest

from pipeline.config.compose import compose
from pipeline.config.rules import check

TOKEN = "hf_TESTSECRET123456"


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (f"name={TOKEN}", "name"),
        (f"output_dir=/data/{TOKEN}", "output_dir"),
        (f"frontend.served_model={TOKEN}", "frontend.served_model"),
        ("model.license=see https://user:s3cretpassw0rd@host/x", "model.license"),
    ],
)
def test_token_in_a_value_is_refused_before_any_work(override: str, path: str) -> None:
    found = [finding for finding in check(compose(["target=reference", override])) if finding.severity == "error"]
    assert ("secret-in-configuration", path) in [(finding.rule, finding.path) for finding in found]
    assert TOKEN not in "".join(finding.message + finding.hint for finding in found)


def test_token_where_it_belongs_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert not [f for f in check(compose(["target=reference"])) if f.rule == "secret-in-configuration"]
