"""Lines to a reader that stops, a disk that is full, a peer that is gone: nobody waits for them."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from twinplane.process.line_writer import LineWriter, make_nonblocking, text_stream

SECONDS = 30.0


def loss(count: int) -> bytes:
    return f"lost {count}\n".encode()


@pytest.fixture(params=["blocking", "nonblocking", "a socket, as a journal has"])
def pipe(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    if request.param.startswith("a socket"):
        reader, writer = (end.detach() for end in socket.socketpair())
    else:
        reader, writer = os.pipe()
    if request.param == "nonblocking":
        os.set_blocking(writer, False)
    yield reader, writer
    for descriptor in (reader, writer):
        with suppress(OSError):  # the test has closed it
            os.close(descriptor)


def fill(descriptor: int) -> None:
    """Writes empty lines until no more fits."""
    blocks = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    for size in (1 << 16, 4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"\n" * size)
    os.set_blocking(descriptor, blocks)


def read_lines(reader: int, writer: LineWriter) -> list[str]:
    """Everything that was put, and that a reader gets who begins now."""
    chunks = []

    def read() -> None:
        while chunk := os.read(reader, 1 << 16):
            chunks.append(chunk)
            if chunk.endswith(b"end\n"):
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert writer.flush(SECONDS)
    writer.put(b"end\n")
    thread.join(SECONDS)
    assert not thread.is_alive()
    return list(filter(None, b"".join(chunks).decode().splitlines()))[:-1]


def counted(lines: list[str]) -> tuple[list[int], int]:
    """The numbers of the lines that arrived, and how many the loss lines tell of."""
    numbers = [int(line.split()[0]) for line in lines if not line.startswith("lost ")]
    return numbers, sum(int(line[5:]) for line in lines if line.startswith("lost "))


def test_nobody_waits_for_a_reader_that_has_stopped(pipe: tuple[int, int]) -> None:
    fill(pipe[1])
    writer = LineWriter(pipe[1], loss)
    count = 5000
    for number in range(count):
        writer.put(f"{number} {'x' * 100}\n".encode())
    assert not writer.flush(0.01)
    assert not writer.has_room
    dropped = writer.dropped_count
    numbers, told = counted(read_lines(pipe[0], writer))
    assert numbers == sorted(set(numbers))
    assert told == dropped == count - len(numbers) > 0
    assert writer.has_room


@pytest.mark.parametrize("seed", range(50))
def test_what_arrives_and_what_is_told_lost_is_all_that_was_put(seed: int) -> None:
    rng = random.Random(seed)
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, bool(seed % 2))
    writer = LineWriter(descriptor, loss, max_waiting_bytes=rng.choice([1, 500, 20_000, 1 << 17]))
    count = rng.randrange(200, 600)
    received = b""
    for number in range(count):
        writer.put(f"{number} {'y' * rng.choice([1, 50, 3000, 9000])}\n".encode())
        if rng.random() < 0.02:
            os.set_blocking(reader, False)
            with suppress(BlockingIOError):
                received += os.read(reader, rng.choice([10, 5000, 1 << 17]))
            os.set_blocking(reader, True)
    rest = read_lines(reader, writer)
    lines = (received.decode() + "\n".join(rest)).splitlines()
    numbers, told = counted(lines)
    assert numbers == sorted(set(numbers))
    assert len(numbers) + told == count
    assert told == writer.dropped_count
    os.close(reader)
    os.close(descriptor)


def test_a_full_disk_is_counted() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(descriptor, loss)
    for _ in range(100):
        writer.put(b"a line\n")
    assert writer.flush(SECONDS)
    assert writer.dropped_count == 100
    os.close(descriptor)


def test_a_disk_that_has_room_again_gets_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    room = 12
    real_write = os.write

    def write(number: int, data: bytes) -> int:
        nonlocal room
        if number != descriptor:
            return real_write(number, data)
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(number, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    writer = LineWriter(descriptor, loss)
    for number in range(5):
        writer.put(f"line {number}\n".encode())
        assert writer.flush(SECONDS)
    room = 1 << 20
    writer.put(b"line 5\n")
    assert writer.flush(SECONDS)
    assert file.read_text() == "line 0\nline \nlost 4\nline 5\n"
    assert writer.dropped_count == 4
    os.close(descriptor)


def test_a_reader_that_is_gone_is_counted(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(pipe[1], loss)
    for _ in range(10):
        writer.put(b"a line\n")
    assert writer.flush(SECONDS)
    assert writer.dropped_count == 10


def test_writers_of_one_pipe_leave_each_others_lines_whole(pipe: tuple[int, int]) -> None:
    def put(number: int) -> None:
        writer = LineWriter(pipe[1], loss)
        for _ in range(300):
            writer.put(b"%d" % number * 99 + b"\n")

    for number in range(3):
        threading.Thread(target=put, args=(number,), daemon=True).start()
    lines = []
    pending = b""
    while len(lines) < 900:
        *whole, pending = (pending + os.read(pipe[0], 1 << 16)).split(b"\n")
        lines += whole
    assert set(lines) == {b"0" * 99, b"1" * 99, b"2" * 99}


def test_only_this_process_stops_waiting() -> None:
    """The flag belongs to the open file, which a shell or another plane may share."""
    reader, shared = os.pipe()
    ours = os.dup(shared)
    make_nonblocking(ours)
    assert not os.get_blocking(ours)
    assert os.get_blocking(shared)
    os.write(ours, b"a")
    os.write(shared, b"b")
    assert os.read(reader, 2) == b"ab"
    for descriptor in (reader, shared, ours):
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["file", "null"])
def test_what_never_waits_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log" if kind == "file" else Path(os.devnull)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"first\n")
    make_nonblocking(descriptor)
    os.write(descriptor, b"second\n")  # a file opened anew would begin at its start
    os.close(descriptor)
    if kind == "file":
        assert path.read_text() == "first\nsecond\n"


def test_a_text_stream_takes_any_character(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], loss)
    stream = text_stream(writer, "ascii", isatty=False)
    print("ü \udcff", file=stream, flush=True)
    assert os.read(pipe[0], 100) == b"\\xfc \\udcff\n"
    assert not stream.isatty()
    assert stream.fileno() == pipe[1]


_ENDS = {
    "returns": ("", 0),
    "raises": ("raise RuntimeError('at the end')", 1),
    "exits": ("sys.exit(7)", 7),
    "exits at once": ("from twinplane.process.exit import exit_at_once; exit_at_once(9)", 9),
}


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("stuck", [True, False], ids=["stuck", "read"])
def test_a_process_ends_whoever_reads_its_log(end: str, stuck: bool) -> None:
    code, expected = _ENDS[end]
    program = (
        "import logging, sys, warnings\n"
        "from twinplane.process.logs import LogFormat, configure\n"
        "configure('info', LogFormat.JSON)\n"
        "for number in range(500): logging.getLogger('a').info('x' * 100)\n"
        "warnings.warn('a warning')\n"
        f"logging.getLogger('a').error('the last line')\n{code}\n"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=writer, cwd=ROOT, env=plane_environment()
    )
    os.close(writer)
    received = b""
    while not stuck and (chunk := os.read(reader, 1 << 16)):
        received += chunk
    assert process.wait(SECONDS) == expected
    os.close(reader)
    if not stuck:
        assert re.search(rb'"message": "the last line"', received)
        assert b"a warning" in received
        assert b"dropped" not in received
        assert (b"RuntimeError: at the end" in received) == (end == "raises")
