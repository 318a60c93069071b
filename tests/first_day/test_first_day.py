"""docs/first-day.md is true, and a page that is not is found out.

The walk stands on the environment that runs the tests: what installs is left out here. A fresh
install is walked by `make firstday`; test_packaging, test_client_install and test_install hold its
parts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.first_day.__main__ import reader_here
from tests.first_day.page import Pressed, Seen, Task, Typed, read_page
from tests.first_day.terminals import NotAsWritten, find_in_order
from tests.first_day.walk import Reader, walk_all
from tests.support.planes import ROOT

PAGE = ROOT / "docs" / "first-day.md"
TITLES = [
    "1. Install",
    "2. First answer",
    "3. Chat",
    "4. Your own model",
    "5. Call it from Node, and with generated code",
    "6. Find out why it did not start",
    "7. Kill the worker and watch",
    "8. Read the capacity",
    "9. Change a setting in three ways",
    "10. Upgrade",
]


def test_the_page_has_ten_tasks_and_each_shows_something() -> None:
    tasks = read_page(PAGE)
    assert [task.title for task in tasks] == TITLES
    for task in tasks:
        assert any(isinstance(act, Typed) for act in task.acts), task.title
        assert any(isinstance(act, Seen) for act in task.acts), task.title


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_page_is_true(tmp_path: Path) -> None:
    try:
        walk_all(reader_here(tmp_path), read_page(PAGE))
    finally:  # half a gigabyte, which pytest would keep
        shutil.rmtree(tmp_path / "first-day" / "my-model", ignore_errors=True)
    undisturbed = (tmp_path / "first-day" / "undisturbed.txt").read_text()
    assert len(undisturbed) > 300
    # Task 7 and task 10 broke a story in the middle: the next claim took it up.
    logs = [log.read_text() for log in sorted(tmp_path.glob("server-*.log"))]
    taken_up = [log for log in logs if "worker attached" in log and "sequence_count=1 " in log]
    assert len(taken_up) == 2


def a_reader(tmp_path: Path) -> Reader:
    here = reader_here(tmp_path)
    return Reader(tmp_path, tmp_path, here.environment, False, 20.0, lambda _: None)


def walk_page(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(text)
    walk_all(a_reader(tmp_path), read_page(tmp_path / "page.md"))


SERVER = "```bash server\ntrap exit INT; echo pid $$; while sleep 0.05; do :; done\n```\n"
CTRL_C = "Press Ctrl-C in the server's terminal.\n"


@pytest.mark.parametrize(
    "text",
    [
        "```bash\necho one\necho two\n```\n```text\none\ntwo\n```\n",
        "```bash\nX=three; cd /\n```\nAnd\n```bash\necho $X $PWD\n```\n```text\n… /\n```\n",
        "```bash\ncat <<'END'\n$HOME\nEND\n```\n```text\n$HOME\n```\n",
        "```bash fails\nfalse\n```\n",
        "```bash install\nfalse\n```\n```text\nnobody looks for this\n```\n",
        f"{SERVER}In the server's terminal:\n```text\npid PID\n```\n"
        f"```bash\nkill -0 PID && echo alive\n```\n```text\nalive\n```\n{CTRL_C}",
        f"{SERVER}In the server's terminal:\n```text\npid …\n```\n{CTRL_C}{SERVER}"
        f"In the server's terminal:\n```text\npid …\n```\n{CTRL_C}",
        "```bash\nsleep 0.2 && echo late > late.txt &\n```\n"
        "```bash\nwait; cat late.txt\n```\n```text\nlate\n```\n",
    ],
)
def test_a_true_page_is_walked(tmp_path: Path, text: str) -> None:
    walk_page(tmp_path, f"# Page\n\n## 1. Task\n\n{text}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```bash\nfalse\n```\n", "exit code 1"),
        ("```bash\nexit 3\n```\n", "no end"),
        ("```bash fails\ntrue\n```\n", "exit code 0"),
        ("```bash\necho one\n```\n```text\ntwo\n```\n", "nothing shows: two"),
        ("```bash\necho one; echo two\n```\n```text\ntwo\none\n```\n", "nothing shows: one"),
        ("```bash\necho a.b\n```\n```text\na+b\n```\n", "nothing shows"),
        ("```bash\necho pid x\n```\n```text\npid PID\n```\n", "nothing shows: pid PID"),
        (SERVER, "leaves running: server"),
        (
            "```bash server\necho gone; exit 1\n```\n"
            "In the server's terminal:\n```text\nready\n```\n",
            "does not show: ready",
        ),
    ],
)
def test_an_untrue_page_is_found_out(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(NotAsWritten, match=r"task 1\. Task: |leaves") as caught:
        walk_page(tmp_path, f"# Page\n\n## 1. Task\n\n{text}")
    assert why in str(caught.value)


def test_nothing_on_the_page_is_overlooked(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for block in (
        "```\nx\n```\n",
        "```python\nx\n```\n",
        "```bash a b\nx\n```\n",
        "```text x\n```\n",
    ):
        page.write_text(f"## 1. Task\n\n{block}")
        with pytest.raises(ValueError, match="neither run nor looked for"):
            read_page(page)
    page.write_text("## 1. Task\n\nPress Ctrl-C\ntwice in the worker's terminal: so.\n")
    assert read_page(page) == [Task("1. Task", (Pressed("worker", 2),))]


@pytest.mark.parametrize(
    ("lines", "output", "missing", "pid"),
    [
        (("a  b",), "x a b y", None, ""),
        (("a …",), "a ", None, ""),
        (("PID is it",), "12 is it", None, "12"),
        (("PID",), "RAPID", "PID", ""),
        (("a", "a"), "a", "a", ""),
        (("ok…b", "c"), "ok b\nc", None, ""),
    ],
)
def test_lines_are_found_in_their_order(
    lines: tuple[str, ...], output: str, missing: str | None, pid: str
) -> None:
    assert find_in_order(lines, output) == (missing, pid)
