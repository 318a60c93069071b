"""Worker processes that are killed, stopped, cut off and told to leave, and come back."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.black_hole import BlackHole, black_hole
from tests.support.planes import ROOT, free_port, is_serving, plane_environment

_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"
START_SECONDS = 120.0
STOP_SECONDS = 60.0


class WorkerProcess:
    """A worker on a port of its own; whoever connects goes through `hole`, which can swallow."""

    def __init__(self, folder: Path, flags: Sequence[str], number: int) -> None:
        self.port = free_port()
        self.hole: BlackHole
        self.exit_codes: list[int] = []
        """Of those that were told to leave."""
        self._flags = flags
        self._log = folder / f"worker-{number}.log"
        self._process: asyncio.subprocess.Process

    @property
    def address(self) -> str:
        """Where the control plane connects."""
        return f"127.0.0.1:{self.hole.port}"

    async def start(self) -> None:
        """Starts a process and waits until it serves. Raises AssertionError with its log."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _CLI, "worker", f"--port={self.port}", *self._flags,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=ROOT, env=plane_environment(),
            )  # fmt: skip
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await asyncio.to_thread(is_serving, f"127.0.0.1:{self.port}"):
                    assert self._process.returncode is None
                    await asyncio.sleep(0.05)
        except (TimeoutError, AssertionError):
            raise AssertionError(self._log.read_text(errors="replace")[-3000:]) from None

    async def kill(self) -> None:
        """SIGKILL; returns at once."""
        self._process.kill()

    async def restart(self) -> None:
        """Waits for the death of one that was killed, and starts the next."""
        await self._process.wait()
        await self.start()

    def stop(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    async def leave(self) -> int:
        """SIGTERM; its exit code."""
        self._process.terminate()
        async with asyncio.timeout(STOP_SECONDS):
            code = await self._process.wait()
        self.exit_codes.append(code)
        return code

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def workers(
    folder: Path, count: int, flags: Sequence[str]
) -> AsyncIterator[list[WorkerProcess]]:
    """So many worker processes, serving. None is left at the end."""
    async with AsyncExitStack() as stack:
        made = [WorkerProcess(folder, flags, number) for number in range(count)]
        for worker in made:
            worker.hole = await stack.enter_async_context(black_hole(worker.port))
            stack.push_async_callback(worker.close)
            await worker.start()
        yield made
