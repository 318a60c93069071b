"""docs/other-languages.md: where the protos are, and that Go and Java come of them.

The languages' plugins are stand-ins: they write down what they were asked to generate.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from tests.support.planes import ROOT, plane_environment
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2

PAGE = (ROOT / "docs" / "other-languages.md").read_text()
WIDE = {getattr(FieldDescriptor, f"CPPTYPE_{name}") for name in ("INT64", "UINT64")}
PLUGIN = """#!{python}
import json, sys
from google.protobuf.compiler import plugin_pb2
request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
response = plugin_pb2.CodeGeneratorResponse(supported_features=1)
for file in request.proto_file:
    if file.name in request.file_to_generate:
        packages = [file.options.go_package, file.options.java_package]
        response.file.add(name="{name}/" + file.name, content=json.dumps(packages))
sys.stdout.buffer.write(response.SerializeToString())
"""
PROTOC = """#!/bin/sh
case "$*" in *--version*) echo 'libprotoc 25.0';; esac
exit 0
"""


def bash_blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment with the plugins that the page names on its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("protoc-gen-go", "protoc-gen-go-grpc", "protoc-gen-grpc-java", "protoc"):
        assert f"`{name}`" in PAGE
        tool = folder / name
        tool.write_text(
            PROTOC if name == "protoc" else PLUGIN.format(python=sys.executable, name=name)
        )
        tool.chmod(0o755)
    path = os.pathsep.join((str(folder), f"{sys.prefix}/bin", os.environ["PATH"]))
    return plane_environment(PATH=path, HOME=str(tmp_path))


def test_the_page_generates_go_and_java(tmp_path: Path, tools: dict[str, str]) -> None:
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    _, command = bash_blocks()
    subprocess.run(command, shell=True, cwd=tmp_path, env=tools, check=True, timeout=120)
    protos = [path.relative_to(ROOT / "protos") for path in ROOT.glob("protos/**/*.proto")]
    assert protos
    for plugin in ("go/protoc-gen-go", "go/protoc-gen-go-grpc", "java/protoc-gen-grpc-java"):
        for proto in protos:
            go, java = json.loads((tmp_path / "gen" / plugin / proto).read_text())
            assert go.startswith(f"example.org/you/gen/go/{proto.parent};")
            # Empty: the package of the proto itself.
            assert java in ("", ".".join(proto.parent.parts))


def test_the_page_finds_the_protos_beside_the_package() -> None:
    find, _ = bash_blocks()
    done = subprocess.run(
        f"{find.replace('python ', sys.executable + ' ')} echo $PROTOS", shell=True, cwd=ROOT,
        env=plane_environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    # In the wheel: test_packaging looks for the files there.
    assert done.stdout.strip() == str(ROOT / "twinplane" / "protos")


def test_the_page_names_every_wide_number_of_the_api_and_json_keeps_it() -> None:
    seen = set()
    for file in (inference_pb2, types_pb2):
        for message in file.DESCRIPTOR.message_types_by_name.values():
            for field in message.fields:
                if field.cpp_type not in WIDE:
                    continue
                seen.add(field.name)
                made = getattr(file, message.name)(**{field.name: 2**64 - 1})
                written = json.loads(
                    json_format.MessageToJson(made, preserving_proto_field_name=True)
                )
                assert written[field.name] == "18446744073709551615"
                assert json_format.Parse(json.dumps(written), type(made)()) == made
    assert seen >= {"seed", "generation"}
    for name in seen:
        assert f"`{name}`" in PAGE.split("## Large numbers in JSON")[1], name
