"""docs/other-languages.md with the languages' real tools: its programs compile, and get an answer.

The tools are Debian's, where they are installed; elsewhere these tests are skipped. Only Debian's
versions were tried:
- Java: protoc 3.21 and grpc-java 1.41, everything as the page has it.
- Go: protoc-gen-go 1.28 and grpc-go 1.33. That is too old for two names of the page, which get
  their older spelling here, and for the codec of today's messages, which is added.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.planes import ROOT, Planes, plane_environment, running_planes
from tests.support.tiny_model import write_tiny_model
from twinplane import Client

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "other-languages.md").read_text()
GO_SOURCES = Path("/usr/share/gocode")
JARS = Path("/usr/share/java")
ARTIFACTS = [
    "protobuf",
    "grpc-api",
    "grpc-stub",
    "grpc-protobuf",
    "grpc-protobuf-lite",
    "grpc-core",
    "grpc-context",
    "grpc-netty",
    "guava",
    "jsr305",
    "perfmark-api",
    "geronimo-annotation-1.3-spec",
    "netty-all",
    "netty-common",
    "netty-buffer",
    "netty-codec",
    "netty-codec-http",
    "netty-codec-http2",
    "netty-handler",
    "netty-resolver",
    "netty-transport",
]
OLD_GO = {
    "grpc.NewClient(": "grpc.Dial(",
    "grpc.WithTransportCredentials(insecure.NewCredentials())": "grpc.WithInsecure()",
    '\t"google.golang.org/grpc/credentials/insecure"\n': "",
}
CODEC = """package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

type codec struct{}

func (codec) Marshal(v any) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }
func (codec) Unmarshal(b []byte, v any) error { return proto.Unmarshal(b, v.(proto.Message)) }
func (codec) Name() string { return "proto" }
func init() { encoding.RegisterCodec(codec{}) }
"""


def program(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)
    return str(text)


def require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def run(command: list[str | Path], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return bytes(done.stdout).decode()  # as written: text mode would turn its \r into \n


@pytest.fixture
def generate(tmp_path: Path) -> Callable[[str], Path]:
    """Runs the page's command for one language, whose plugins are there; returns the folder."""

    def generated(language: str) -> Path:
        template = (ROOT / "protos" / "buf.gen.yaml").read_text()
        head, *plugins = re.split(r"^(?=  - (?:local|protoc_builtin):)", template, flags=re.M)
        own = [plugin for plugin in plugins if f"out: gen/{language}\n" in plugin]
        assert 0 < len(own) < len(plugins)
        copied = tmp_path / "protos"
        shutil.copytree(ROOT / "protos", copied)
        (copied / "buf.gen.yaml").write_text(head + "".join(own))
        renamed = shutil.which("grpc_java_plugin")  # Debian's name of it
        if renamed is not None:
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin" / "protoc-gen-grpc-java").symlink_to(renamed)
        path = os.pathsep.join((f"{tmp_path}/bin", f"{sys.prefix}/bin", os.environ["PATH"]))
        environment = plane_environment(PATH=path, HOME=str(tmp_path))
        _, command = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.S | re.M)
        run(["bash", "-ec", command], cwd=tmp_path, env=environment)
        return tmp_path / "gen" / language

    return generated


@pytest.fixture(scope="module")
def greedy_planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    """Both planes, simulated, whose model's own files ask for temperature 0: the programs give no
    seed, and are to be told the same answer as everybody."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "greedy")
    (model / "generation_config.json").write_text('{"do_sample": false}')
    with running_planes(tmp_path_factory.mktemp("planes"), model) as planes:
        yield planes


def check(answer: str, planes: Planes) -> None:
    """It is what our own client gets for the same request."""
    with Client(planes.address) as client:
        expected = client.complete("The capital of France is", max_tokens=8)
    assert expected.text
    assert answer == expected.text


def test_the_java_program_of_the_page_gets_an_answer(
    greedy_planes: Planes, generate: Callable[[str], Path], tmp_path: Path
) -> None:
    require("javac", "java", "protoc", "grpc_java_plugin")
    jars = [JARS / f"{name}.jar" for name in ARTIFACTS]
    missing = [jar.name for jar in jars if not jar.is_file()]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    operators = {"control", "worker"}  # theirs are large, and no client of the page needs them
    sources = [path for path in generate("java").rglob("*.java") if not operators & {*path.parts}]
    ask, classes = tmp_path / "Ask.java", tmp_path / "classes"
    ask.write_text(program("java"))
    path = os.pathsep.join(map(str, [classes, *jars]))
    run(["javac", "-nowarn", "-cp", path, "-d", classes, ask, *sources])
    check(run(["java", "-cp", path, "Ask", greedy_planes.address]), greedy_planes)


def test_the_go_program_of_the_page_gets_an_answer(
    greedy_planes: Planes, generate: Callable[[str], Path], tmp_path: Path
) -> None:
    require("go", "gofmt", "protoc-gen-go", "protoc-gen-go-grpc")
    if not (GO_SOURCES / "src" / "google.golang.org" / "protobuf").is_dir():
        pytest.skip("google.golang.org/protobuf is not installed")
    module = tmp_path / "go" / "src" / "example.org" / "you"
    shutil.copytree(generate("go"), module / "gen" / "go")
    text = program("go")
    assert run(["gofmt"], input=text.encode()) == text, "it is not formatted as Go is"
    for name, old in OLD_GO.items():
        assert name in text
        text = text.replace(name, old)
    (module / "ask").mkdir()
    (module / "ask" / "main.go").write_text(text)
    (module / "ask" / "codec.go").write_text(CODEC)
    paths = f"{tmp_path / 'go'}{os.pathsep}{GO_SOURCES}"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": paths, "GOFLAGS": ""}
    run(["go", "build", "-o", tmp_path / "ask", "example.org/you/ask"], env=environment)
    check(run([tmp_path / "ask", greedy_planes.address]), greedy_planes)
