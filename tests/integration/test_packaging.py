"""The wheel that users get: what is in it, and that the control plane serves without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from readme_renderer import markdown

import twinplane
from hatch_build import readme_for_an_index
from tests.support.planes import ROOT, plane_environment, running_planes
from twinplane import Client

pytestmark = pytest.mark.slow

NOT_IN_THE_CONTROL_INSTALL = ("torch", "transformers", "safetensors", "triton", "flashinfer")
BLOCK_IMPORTS = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] in {NOT_IN_THE_CONTROL_INSTALL!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Absent())
"""
IMPORT_EVERYTHING = """
import pkgutil, importlib, twinplane, control_plane
seen = []
for package in (twinplane, control_plane):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
        if module.name.rpartition('.')[2] != '__main__':
            importlib.import_module(module.name)
            seen.append(module.name)
for stubs in ('common.v1.types', 'worker.v1.step', 'inference.v1.inference'):
    importlib.import_module(f'twinplane.{stubs}_pb2')
from twinplane.inference.v1 import inference_pb2_grpc
assert {'control_plane.core.scheduler', 'twinplane.client.aio'} <= set(seen), seen
assert 'torch' not in sys.modules
print(twinplane.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a fresh clone has it: what git ignores is not there, stubs least of all."""
    folder = tmp_path_factory.mktemp("source") / "twinplane"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    assert not list(folder.rglob("*_pb2.py"))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the fresh tree by the backend itself: nothing is downloaded."""
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def build(source: Path, folder: Path, target: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def build_wheel(source: Path, folder: Path) -> Path:
    build(source, folder, "wheel")
    (built,) = folder.glob("*.whl")
    return built


def test_only_a_wheel_with_compiled_kernels_is_for_one_platform(
    wheel: Path, source: Path, tmp_path: Path
) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    shutil.copytree(source, tmp_path / "source")
    library = tmp_path / "source" / "worker_service/kernels/cpu/prebuilt/digest/lib.so"
    library.parent.mkdir(parents=True)
    library.touch()
    built = build_wheel(tmp_path / "source", tmp_path)
    assert re.search(r"-py3-none-linux_\w+\.whl$|-py3-none-macosx_\w+\.whl$", built.name)
    named = library.relative_to(tmp_path / "source").as_posix()
    assert named in zipfile.ZipFile(built).namelist()


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_the_packages_and_their_stubs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in sorted((ROOT / "protos").rglob("*.proto")):
        stem = proto.relative_to(ROOT / "protos").with_suffix("").as_posix()
        assert {f"{stem}_pb2.py", f"{stem}_pb2.pyi", f"twinplane/protos/{stem}.proto"} <= names
    assert "twinplane/inference/v1/__init__.py" in names
    assert "twinplane/inference/v1/inference_pb2_grpc.py" in names
    assert "twinplane/worker/v1/model_runner_pb2_grpc.py" in names
    assert "twinplane/py.typed" in names
    assert not [name for name in names if name.endswith(".pyc")]
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        "twinplane",
        "control_plane",
        "worker_service",
        f"twinplane-{twinplane.__version__}.dist-info",
    }


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path, source: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("twinplane", "control_plane", "worker_service"):
        files = [path for path in (source / package).rglob("*") if path.is_file()]
        assert files
        assert {path.relative_to(source).as_posix() for path in files} <= names


def test_the_wheel_says_what_it_is(unpacked: Path) -> None:
    folder = unpacked / f"twinplane-{twinplane.__version__}.dist-info"
    metadata = Parser().parsestr((folder / "METADATA").read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "twinplane = twinplane.cli:main" in (folder / "entry_points.txt").read_text()
    assert "Apache License" in (folder / "licenses" / "LICENSE").read_text()
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    base = {requirement.name for requirement in requirements if requirement.marker is None}
    assert base == {"googleapis-common-protos", "grpcio", "protobuf"}
    assert {"control", "worker", "gpu"} <= set(metadata.get_all("Provides-Extra"))
    control = {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": "control"})}
    assert not control & set(NOT_IN_THE_CONTROL_INSTALL)


def test_an_index_takes_both_packages(source: Path, wheel: Path, tmp_path: Path) -> None:
    build(source, tmp_path, "sdist")
    (archive,) = tmp_path.glob("*.tar.gz")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, archive],
        capture_output=True, text=True, timeout=120, env=plane_environment(HOME=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_readme_is_whole_on_an_index(unpacked: Path) -> None:
    """An index shows it alone: a link into the repository would lead nowhere."""
    folder = unpacked / f"twinplane-{twinplane.__version__}.dist-info"
    metadata = Parser().parsestr((folder / "METADATA").read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = markdown.render(metadata.get_payload())
    assert page is not None
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert [t for t in targets if not t.startswith(("https://", "#user-content-"))] == []
    shown = (ROOT / "README.md").read_text()
    assert page.count("<pre") == len(re.findall(r"^```\w*$", shown, re.M)) / 2
    assert page.count("<table") == len(re.findall(r"^\|[-| ]+\|$", shown, re.M)) > 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[docs/a.md](docs/a.md): b", "docs/a.md: b"),
        ("[a](https://example.org/x) [b](y)", "[a](https://example.org/x) b"),
        ("![picture](docs/a.png)", "picture"),
        ("```python\nx[0](y)\n```", "```python\nx[0](y)\n```"),
        ("[a](b)\n```\n[c](d)\n```\n[e](f)", "a\n```\n[c](d)\n```\ne"),
        ("`a[0]` (b) [c]", "`a[0]` (b) [c]"),
    ],
)
def test_links_into_the_repository_become_their_text(text: str, shown: str) -> None:
    assert readme_for_an_index(text) == shown


def test_the_source_package_builds_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    build(source, tmp_path, "sdist")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    again = build_wheel(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_client_and_control_plane_import_without_torch(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_IMPORTS + IMPORT_EVERYTHING],
        cwd=unpacked,
        env=plane_environment(PYTHONPATH=str(unpacked)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_the_control_install_serves_a_simulated_worker(
    unpacked: Path, tiny_model: Path, tmp_path: Path
) -> None:
    environment = plane_environment(PYTHONPATH=str(unpacked))
    with (
        running_planes(
            tmp_path, tiny_model, prelude=BLOCK_IMPORTS, environment=environment
        ) as planes,
        Client(planes.address, timeout=60.0) as client,
    ):
        result = client.generate("Hello", max_tokens=6, ignore_eos=True).result()
        assert len(result.token_ids) == 6
        assert result.usage.prompt_token_count == 5
        control, worker = planes.control, planes.worker
    assert (control.process.returncode, worker.process.returncode) == (0, 0)
