"""Generates the gRPC stubs from protos/: a hatch build hook, and a script for `make protos`.

A second hook makes README.md fit for a package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # run as a script without hatchling
    BuildHookInterface = MetadataHookInterface = object

ROOT = Path(__file__).resolve().parent


def generate(root: Path) -> list[Path]:
    """Writes the stubs of every proto under root/protos beside the package of its own name.

    Returns the generated files. Raises CalledProcessError when protoc refuses a file.
    """
    protos = sorted((root / "protos").rglob("*.proto"))
    generated: list[Path] = []
    for package in sorted({p.parent.relative_to(root / "protos") for p in protos}):
        (root / package).mkdir(parents=True, exist_ok=True)
        # twinplane/worker and twinplane/worker/v1: packages, so that import contracts see them.
        for folder in (package.parent, package):
            init = root / folder / "__init__.py"
            init.write_text('"""Generated from protos/."""\n')
            generated.append(init)
    arguments = [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={root / 'protos'}",
            *arguments,
            *map(str, protos),
        ],
        check=True,
    )
    with_service = {p for p in protos if "\nservice " in p.read_text()}
    for proto in protos:
        stem = root / proto.relative_to(root / "protos").with_suffix("")
        stub = Path(f"{stem}_pb2_grpc.py")
        if proto not in with_service:
            stub.unlink(missing_ok=True)  # protoc writes an empty one
        else:
            generated.append(stub)
        generated += [Path(f"{stem}_pb2.py"), Path(f"{stem}_pb2.pyi")]
    return generated


def readme_for_an_index(readme: str) -> str:
    """The README without its links into the repository, which lead nowhere on an index's page.

    A link's text stays. Code stays as it is.
    """
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else _RELATIVE_LINK.sub(r"\1", part) for part in parts
    )


_RELATIVE_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https://)[^)]*\)")


class ReadmeMetadataHook(MetadataHookInterface):  # type: ignore[misc,valid-type]
    """Sets the package's long description."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = readme_for_an_index((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class StubsBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Puts fresh stubs into the wheel and into an editable install, and the protos into the wheel.

    A wheel that holds compiled kernels says for which platform; the others are for any.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        generate(root)
        if version == "standard":  # an editable install has them in its own folder
            build_data["force_include"][str(root / "protos")] = "twinplane/protos"
        if any((root / "worker_service/kernels/cpu/prebuilt").rglob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    for path in generate(ROOT):
        print(path.relative_to(ROOT))
