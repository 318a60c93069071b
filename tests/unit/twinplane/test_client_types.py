"""What a type checker says of programs that use the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.planes import ROOT

pytestmark = pytest.mark.slow

RIGHT = """
import twinplane
from twinplane import AsyncClient, Client, GenerateOptions, Health, Message, MessageDict

options: GenerateOptions = {"max_tokens": 3, "stop": None}
turns: list[MessageDict] = [{"role": "user", "content": "hi"}]
client = Client("127.0.0.1:50051", metadata={"authorization": "Bearer x"}, timeout=3)
client.generate("text", **options)
client.generate([1, 2])
client.generate((1, 2), temperature=0)
client.generate([Message("user", "hi")])
client.generate([{"role": "user", "content": "hi"}])
client.generate([{"role": "system", "content": "Be brief."}, Message("user", "hi")])
client.generate(turns)
turns.append({"role": "assistant", "content": client.complete(turns).text})
tokens: tuple[int, ...] = client.tokenize(turns)
ready: bool = client.health() is Health.SERVING
client.wait_ready(5)
try:
    client.complete("x", max_tokens=None)
except twinplane.TwinplaneError as error:
    text: str = error.partial.text if error.partial is not None else ""


async def main() -> str:
    async with AsyncClient() as other:
        await other.wait_ready(timeout=5)
        async for delta in other.generate([{"role": "user", "content": "hi"}]):
            print(delta.text)
        return (await other.complete("x", stop=["a"])).text
"""

WRONG = (
    ("from twinplane import Cleint", "attr-defined"),
    ("import twinplane; twinplane.Cleint", "attr-defined"),
    ("import twinplane; twinplane.no_such_name()", "attr-defined"),
    ('twinplane.Client().generate("x", max_tokens="3")', "arg-type"),
    ('twinplane.Client().generate("x", temprature=0)', "call-arg"),
    ('twinplane.Client().generate([{"rol": "user", "content": "x"}])', ""),
    ('twinplane.Client().generate([{"role": "user"}])', ""),
    ("twinplane.Client().generate(None)", "arg-type"),
    ("twinplane.Client().generate([{'role': 'user', 'content': 5}])", ""),
    ("twinplane.Client().complete([1.5])", ""),
    ('twinplane.Client(credentials="ca.pem")', "arg-type"),
    ('twinplane.Client().wait_ready("5")', "arg-type"),
    ("twinplane.Client().tokenize([1, 2])", ""),
    ("twinplane.Client().complete('x').txt", "attr-defined"),
)


def test_right_programs_pass_and_each_wrong_line_is_found(tmp_path: Path) -> None:
    """One run for all, since most of its time is the checker's start."""
    (tmp_path / "right.py").write_text(RIGHT)
    lines = ["import twinplane", *(line for line, _ in WRONG)]
    (tmp_path / "wrong.py").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary",
         "--hide-error-context", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"),
         "right.py", "wrong.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        file, _, rest = line.partition(":")
        assert file == "wrong.py", done.stdout + done.stderr
        number, _, message = rest.partition(":")
        if ": note:" not in line:
            found.setdefault(int(number), message)
    for number, (program, code) in enumerate(WRONG, start=2):
        assert number in found, f"{program} passes"
        assert code in found[number]
    assert set(found) == set(range(2, len(WRONG) + 2))
