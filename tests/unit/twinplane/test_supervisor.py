"""The supervisor over small programs: deaths, starts, signals, and its last line."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from twinplane.cli.child import Plane, Restarting
from twinplane.cli.restarts import RestartPolicy
from twinplane.cli.supervisor import Supervisor
from twinplane.cli.terminal import Terminal

PATIENCE = 60.0
SOON = RestartPolicy(first_delay=0.01, longest_delay=0.02, short_life=30.0, max_short_lives=4)

# Ends in order when its standard input does, as a plane has to.
OBEDIENT = "import sys; sys.stdin.read(); print('over', file=sys.stderr)"
FAILED = '{"level": "error", "message": "stopped", "reason": "could not load: no such file"}'
FAILED_TEXT = '12:00:00.000 error   stopped reason="could not load: no such file" broken=True'


class Serving:
    """Readiness that a test gives. Each look at it is counted."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.looks = 0
        self._at_once = at_once

    async def serving(self) -> None:
        self.looks += 1
        if not self._at_once:
            await asyncio.Event().wait()


@dataclass
class Stage:
    """A supervisor that runs, and what it has printed."""

    folder: Path
    output: io.StringIO = field(default_factory=io.StringIO)
    errors: io.StringIO = field(default_factory=io.StringIO)
    now: float = 0.0

    def worker(
        self, code: str, *, serves: bool = True, policy: RestartPolicy = SOON
    ) -> tuple[Plane, Serving]:
        """A plane that is started again. Each life adds a line to the file `lives`."""
        note = f"import os; open({str(self.folder / 'lives')!r}, 'a').write(f'{{os.getpid()}}\\n')"
        readiness = Serving(at_once=serves)
        restarting = Restarting(readiness, policy)
        return Plane("worker", ("-c", f"{note}\n{code}"), 20.0, "", restarting), readiness

    def supervisor(self, *planes: Plane, ready: bool = True) -> Supervisor:
        terminal = Terminal("up", self.output, self.errors)
        return Supervisor(planes, Serving(at_once=ready), "ready: x", terminal, lambda: self.now)

    @property
    def pids(self) -> list[int]:
        path = self.folder / "lives"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def last_error(self) -> str:
        return self.errors.getvalue().splitlines()[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def control(code: str = OBEDIENT) -> Plane:
    return Plane("control plane", ("-c", code), 20.0)


async def test_a_worker_that_dies_is_started_again_until_it_is_given_up(stage: Stage) -> None:
    worker, readiness = stage.worker(OBEDIENT)
    running = asyncio.create_task(stage.supervisor(worker, control()).run())
    for life in range(SOON.max_short_lives):
        # Only a life that has served may be short of it; before that, death is final.
        await stage.until(lambda n=life: len(stage.pids) > n and readiness.looks > n)
        os.kill(stage.pids[life], signal.SIGKILL)
    assert await asyncio.wait_for(running, PATIENCE) == 1
    assert len(stage.pids) == SOON.max_short_lives
    told = stage.errors.getvalue()
    assert told.count("the worker was killed by SIGKILL; it is started again in") == 3
    assert stage.output.getvalue().count("the worker is back: process") == 3
    assert stage.last_error == (
        "up: the worker was killed by SIGKILL, as the system does when memory runs out; "
        "given up, since 4 lives in a row served for less than 30 s"
    )


async def test_long_lives_are_never_given_up(stage: Stage) -> None:
    worker, readiness = stage.worker(OBEDIENT)
    running = asyncio.create_task(stage.supervisor(worker, control()).run())
    for life in range(2 * SOON.max_short_lives):
        await stage.until(lambda n=life: len(stage.pids) > n and readiness.looks > n)
        stage.now += 31.0
        os.kill(stage.pids[life], signal.SIGKILL)
    await stage.until(lambda: len(stage.pids) > 2 * SOON.max_short_lives)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, PATIENCE) == 0
    assert stage.output.getvalue().splitlines()[-1] == "stopped: SIGTERM"


@pytest.mark.parametrize("line", [FAILED, FAILED_TEXT])
async def test_a_worker_that_never_came_up_ends_all_with_its_cause(stage: Stage, line: str) -> None:
    code = f"import sys; print({line!r}, file=sys.stderr); sys.exit(1)"
    worker, _ = stage.worker(code, serves=False)
    chatty = "import sys; sys.stdin.read(); [print('later', file=sys.stderr) for _ in range(50)]"
    assert await stage.supervisor(worker, control(chatty), ready=False).run() == 1
    assert len(stage.pids) == 1
    assert stage.last_error == "up: the worker could not load: no such file"
    assert stage.output.getvalue() == ""


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise KeyError('weights')", "ended with exit code 1: KeyError: 'weights'"),
        ("import sys; sys.exit('worker: --x is no flag')",
         "ended with exit code 1: worker: --x is no flag"),
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("pass", "ended with exit code 0"),
        ("import sys; print('{\"level\": \"info\", \"message\": \"loading\"}', file=sys.stderr); "
         "sys.exit(3)", "ended with exit code 3"),
        ("import sys; print('{\"level\": \"error\", \"message\": \"no\", \"error\": \"way\"}', "
         "file=sys.stderr); sys.exit(3)", "ended with exit code 3: no: way"),
        ("import os, sys; print('terminate called', file=sys.stderr, flush=True); os.abort()",
         "was killed by SIGABRT: terminate called"),
        ("import sys; print('x' * 200_000 + '\\nlast', file=sys.stderr); sys.exit(1)",
         "ended with exit code 1: last"),
        ("import sys; print('last\\n\\n  \\n', file=sys.stderr); sys.exit(1)",
         "ended with exit code 1: last"),
    ],
)  # fmt: skip
async def test_whatever_it_said_last_is_the_last_line(stage: Stage, code: str, cause: str) -> None:
    worker, _ = stage.worker(code, serves=False)
    assert await stage.supervisor(worker, control(), ready=False).run() == 1
    assert stage.last_error == f"up: the worker {cause}"


async def test_a_dead_control_plane_ends_all_at_once(stage: Stage) -> None:
    worker, _ = stage.worker(OBEDIENT)
    dying = "import sys, time; print('no more', file=sys.stderr); sys.exit(7)"
    assert await stage.supervisor(worker, control(dying)).run() == 1
    assert len(stage.pids) == 1
    assert stage.last_error == "up: the control plane ended with exit code 7: no more"


async def test_a_signal_between_two_lives_ends_all_well(stage: Stage) -> None:
    """No life begins after it, and what others killed is not told as `up`'s own deed."""
    policy = RestartPolicy(first_delay=1e6, longest_delay=1e6)
    worker, readiness = stage.worker(OBEDIENT, policy=policy)
    running = asyncio.create_task(stage.supervisor(worker, control()).run())
    await stage.until(lambda: bool(stage.pids) and readiness.looks == 1)
    os.kill(stage.pids[0], signal.SIGKILL)
    await stage.until(lambda: "started again" in stage.errors.getvalue())
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, PATIENCE) == 0
    assert stage.output.getvalue().splitlines()[-1] == "stopped: SIGINT"
    assert len(stage.pids) == 1


async def test_a_second_signal_kills_and_the_code_says_so(stage: Stage) -> None:
    deaf = "import time\nwhile True: time.sleep(1)"
    worker, _ = stage.worker(deaf)
    running = asyncio.create_task(stage.supervisor(worker, control()).run())
    await stage.until(lambda: bool(stage.pids) and "ready" in stage.output.getvalue())
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)  # signals of one kind that arrive together are one
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, PATIENCE) == 1
    assert stage.output.getvalue().splitlines()[-1].startswith("stopped: SIG")


async def test_the_ready_line_is_followed_by_the_number_of_the_worker(stage: Stage) -> None:
    worker, _ = stage.worker(OBEDIENT)
    running = asyncio.create_task(stage.supervisor(worker, control()).run())
    await stage.until(lambda: "process" in stage.output.getvalue() and bool(stage.pids))
    assert stage.output.getvalue().splitlines()[:2] == [
        "ready: x",
        f"the worker is process {stage.pids[0]}; when it dies it is started again, and no answer "
        "is lost",
    ]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, PATIENCE) == 0
