"""Walks docs/first-day.md: does in order what it says, and looks for what it says one sees."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.first_day.page import Pressed, Seen, Task, Typed
from tests.first_day.terminals import NotAsWritten, Server, Shell, find_in_order
from tests.support.planes import free_port

DEFAULT_PORTS = ("50051", "50061", "9400")


@dataclass(frozen=True, slots=True)
class Reader:
    """Who walks: in which clone, with which environment, in which empty folder as home.

    `installs`: whether the commands that install are run, or an environment stands for them.
    `seconds`: what one command, or one line in a server's terminal, may take.
    """

    clone: Path
    home: Path
    environment: Mapping[str, str]
    installs: bool
    seconds: float
    tell: Callable[[str], None] = print


@dataclass(slots=True, eq=False)
class Walk:
    """Where the reader is: what was said last, which servers run, and the worker's number."""

    reader: Reader
    shell: Shell
    ports: Mapping[str, str]
    owned: ExitStack
    servers: dict[str, Server] = field(default_factory=dict)
    output: str = ""
    pid: str = ""
    is_skipping: bool = False

    def task(self, task: Task) -> None:
        """Does a task. Raises NotAsWritten."""
        for act in task.acts:
            match act:
                case Typed():
                    self._type(act)
                case Pressed(terminal, count):
                    self.servers.pop(terminal).press_ctrl_c(count, self.reader.seconds)
                case Seen():
                    self._see(act)

    def _type(self, act: Typed) -> None:
        self.is_skipping = bool(reason := self._why_not(act))
        if reason:
            self.reader.tell(f"   left out, {reason}: {act.text.splitlines()[0]} …")
            return
        text = self._ours(act.text)
        if not act.terminal:
            self.output = self.shell.type(act, text, self.reader.seconds)
            return
        number = sum(1 for _ in self.reader.home.glob(f"{act.terminal}-*.log"))
        log = self.reader.home / f"{act.terminal}-{number}.log"
        environment = dict(self.reader.environment)
        if "twinplane worker" in text:  # these name the control plane's ports
            del environment["TWINPLANE_PORT"], environment["TWINPLANE_METRICS_PORT"]
        server = Server(text, self.reader.clone, environment, log)
        self.owned.enter_context(closing(server))
        self.servers[act.terminal] = server

    def _see(self, act: Seen) -> None:
        if self.is_skipping:
            return
        lines = [self._ours(line, pid=False) for line in act.lines]
        if act.terminal:
            self.pid = self.servers[act.terminal].see(lines, self.reader.seconds) or self.pid
            return
        missing, _ = find_in_order(lines, self.output)
        if missing is not None:
            raise NotAsWritten(f"nothing shows: {missing}\n{self.output[-4000:]}")

    def _why_not(self, act: Typed) -> str:
        if "install" in act.marks and not self.reader.installs:
            return "an environment is there"
        if "node" in act.marks and not (shutil.which("node") and shutil.which("npm")):
            return "Node and npm are not on this machine"
        return ""

    def _ours(self, text: str, *, pid: bool = True) -> str:
        """The text with this walk's ports, and the worker's number."""
        for port, ours in self.ports.items():
            text = re.sub(rf"\b{port}\b", ours, text)
        return re.sub(r"\bPID\b", self.pid or "PID", text) if pid else text


@contextmanager
def walking(reader: Reader) -> Iterator[Walk]:
    """A walk on free ports. Whatever still runs at its end is killed."""
    ports = {port: str(free_port()) for port in DEFAULT_PORTS}
    environment = {
        **reader.environment,
        "HOME": str(reader.home),
        "TWINPLANE_PORT": ports["50051"],
        "TWINPLANE_METRICS_PORT": ports["9400"],
        "TWINPLANE_ADDRESS": f"127.0.0.1:{ports['50051']}",
        "TWINPLANE_LOG_FORMAT": "text",  # as on a terminal
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "PYTHONHOME"):
        environment.pop(name, None)
    ours = replace(reader, environment=environment)
    with ExitStack() as owned:
        shell = owned.enter_context(
            closing(Shell(reader.clone, environment, reader.home / "shell.log"))
        )
        yield Walk(ours, shell, ports, owned)


def walk_all(reader: Reader, tasks: list[Task]) -> None:
    """Every task, with a line for each. Raises NotAsWritten, with the task's title."""
    with walking(reader) as walk:
        for task in tasks:
            begin = time.monotonic()
            reader.tell(f"{task.title} …")
            try:
                walk.task(task)
            except NotAsWritten as error:
                raise NotAsWritten(f"task {task.title}: {error}") from error
            reader.tell(f"   done in {time.monotonic() - begin:.0f} s")
        left = sorted(walk.servers)
        if left:
            raise NotAsWritten(f"the page leaves running: {', '.join(left)}")


def path_with(folder: Path, environment: Mapping[str, str]) -> str:
    """A PATH on which the environment's commands come first, as once it is activated."""
    return f"{folder}:{environment.get('PATH', '/usr/bin:/bin')}"
