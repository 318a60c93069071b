"""docs/client.md: its program runs as it stands, and its words are those of the package."""

from __future__ import annotations

import re
from collections import deque

import grpc
import pytest

import twinplane
from tests.support.planes import ROOT
from tests.support.scripted_inference import (
    Fail,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)

PAGE = (ROOT / "docs" / "client.md").read_text()
ADDRESS = "127.0.0.1:50051"


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    assert program.count(ADDRESS) == 1
    service = ScriptedInference(
        scripts=deque(
            [
                [started(), delta("Paris.", 1), finished()],
                [started(), delta("Once", 1), Fail(grpc.StatusCode.INTERNAL, "a bug")],
            ]
        )
    )
    service.health.append(1)
    with serve(service) as address:
        exec(compile(program.replace(ADDRESS, address), "client.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Paris. FinishReason.LENGTH Usage(")
    assert lines[1:] == ["Once", "broke after 4 characters: a bug"]


def test_the_names_exist() -> None:
    errors = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert len(errors) >= 6
    for name in errors:
        assert issubclass(getattr(twinplane, name), twinplane.TwinplaneError)
    for attribute in ("reason", "metadata", "retry_after", "violations", "partial"):
        assert f"`{attribute}`" in PAGE
        assert hasattr(twinplane.TwinplaneError("x"), attribute)
