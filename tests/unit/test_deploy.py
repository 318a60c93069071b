"""deploy/ agrees with the code: flags, ports, probes, graces, extras and versions."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
import tomllib
from typing import Any

import pytest
import yaml

from tests.support.planes import ROOT, Planes
from twinplane.cli.model import command_line
from twinplane.grpc.health import LIVENESS, READINESS
from twinplane.settings import resolution
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.worker import WorkerConfig

DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
(POD,) = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", README, re.S | re.M))
CONTAINERS = {container["name"]: container for container in POD["spec"]["containers"]}
# A plane ends within this time once its grace is over; `twinplane up` kills it then.
MARGIN_SECONDS = 5.0


def stage(name: str) -> str:
    """A stage's instructions, one a line."""
    (text,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.S | re.M)
    return str(text)


def entry_point(name: str) -> list[str]:
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", stage(name), re.M)
    return list(yaml.safe_load(words))


def settings(plane: str, arguments: list[str]) -> ControlConfig | WorkerConfig:
    """What the image makes of a container's arguments. Unknown flags and bad values raise."""
    twinplane, command, *flags = entry_point(plane)
    assert (twinplane, command) == ("twinplane", plane)
    cls: type[ControlConfig | WorkerConfig] = ControlConfig if plane == "control" else WorkerConfig
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    resolution.add_arguments(parser, cls)
    namespace = parser.parse_args([*flags, *arguments])
    return resolution.resolve(cls, namespace, {}, None, plane, known=known_settings())


def as_given(words: list[str]) -> list[str]:
    """A command as compose hands it over when no variable is set."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


CONFIGS = [
    *((plane, as_given(SERVICES[plane]["command"])) for plane in ("control", "worker")),
    *((plane, CONTAINERS[plane]["args"]) for plane in ("control", "worker")),
]


@pytest.mark.parametrize(("plane", "arguments"), CONFIGS)
def test_the_arguments_are_settings_and_all_agree(plane: str, arguments: list[str]) -> None:
    config = settings(plane, arguments)
    assert config.host == "0.0.0.0"
    exposed = {
        int(port)
        for port in re.findall(r"\d+", re.findall(r"^EXPOSE (.*)$", stage(plane), re.M)[0])
    }
    if isinstance(config, ControlConfig):
        assert exposed == {config.port, config.metrics_port}
        assert config.metrics_host == "0.0.0.0"
        port = config.worker.rpartition(":")[2]
        assert {int(port)} == {WorkerConfig().port}
    else:
        assert exposed == {config.port}
    assert config.model == ControlConfig().model


@pytest.mark.parametrize("plane", ["control", "worker"])
def test_a_container_has_longer_to_end_than_its_plane(plane: str) -> None:
    given = SERVICES[plane]["stop_grace_period"]
    for seconds, arguments in (
        (float(given.removesuffix("s")), as_given(SERVICES[plane]["command"])),
        (POD["spec"]["terminationGracePeriodSeconds"], CONTAINERS[plane]["args"]),
    ):
        config = settings(plane, arguments)
        grace = (
            config.drain_grace_seconds
            if isinstance(config, ControlConfig)
            else config.drain_seconds
        )
        assert seconds >= grace + MARGIN_SECONDS
        assert f"| {grace:.0f} s | {seconds:.0f} s |" in README
    assert WorkerConfig().drain_seconds >= ControlConfig().drain_grace_seconds


def test_compose_shares_models_and_publishes_on_this_machine_alone() -> None:
    assert SERVICES.keys() == {"model", "worker", "control"}
    for service in SERVICES.values():
        assert service["volumes"] == ["models:/models"]
        target = service["build"]["target"]
        assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert service["image"] == f"twinplane-{target}"
        assert f"--target {target} -t twinplane-{target}" in DOCKERFILE
    assert COMPOSE["volumes"].keys() == {"models"}
    config = settings("control", as_given(SERVICES["control"]["command"]))
    assert isinstance(config, ControlConfig)
    assert config.worker.partition(":")[0] in SERVICES
    assert SERVICES["control"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (config.port, config.metrics_port)
    ]
    assert "ports" not in SERVICES["worker"]
    assert SERVICES["worker"]["build"]["args"].keys() <= set(
        re.findall(r"^ARG (\w+)", stage("worker"), re.M)
    )
    for plane in ("worker", "control"):
        assert (
            SERVICES[plane]["depends_on"]["model"]["condition"] == "service_completed_successfully"
        )
        assert SERVICES[plane]["restart"] == "unless-stopped"


def test_probes_ask_by_names_that_there_are_and_liveness_is_not_readiness() -> None:
    control, worker = CONTAINERS["control"], CONTAINERS["worker"]
    paths = {kind: control[kind]["httpGet"]["path"] for kind in control if kind.endswith("Probe")}
    assert paths == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    sources = [*ROOT.glob("control_plane/**/*.py"), *ROOT.glob("twinplane/**/*.py")]
    source = "".join(path.read_text() for path in sources)
    for path in paths.values():
        assert f'"{path}"' in source
        assert f"`{path}` on {ControlConfig().metrics_port}" in README
    names = {kind: worker[kind]["grpc"]["service"] for kind in worker if kind.endswith("Probe")}
    assert names == {
        "startupProbe": READINESS,
        "readinessProbe": READINESS,
        "livenessProbe": LIVENESS,
    }
    assert {worker[kind]["grpc"]["port"] for kind in names} == {WorkerConfig().port}
    assert {control[kind]["httpGet"]["port"] for kind in paths} == {ControlConfig().metrics_port}
    assert "/readyz" in " ".join(SERVICES["control"]["healthcheck"]["test"])


def test_the_images_install_what_ci_tests_for_a_user_who_may_write() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pins = (ROOT / "requirements" / "ci.txt").read_text()
    for plane in ("control", "worker"):
        text = stage(plane)
        installs = re.findall(r"pip install[^&\n]*", text)
        assert installs
        assert all("-c /wheels/constraints.txt" in line for line in installs)
        assert re.findall(r"\.whl\)\[(\w+)\]", text) == [plane]
        assert plane in extras
        steps = text.splitlines()
        owned = next(i for i, step in enumerate(steps) if "--owner=twinplane /models" in step)
        assert owned < steps.index("USER twinplane") < steps.index("VOLUME /models")
        assert "ENV TWINPLANE_HOME=/models" in steps
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", stage("worker"), re.M)
    assert torch.endswith("+cpu")
    assert torch.removesuffix("+cpu") in pins.splitlines()
    assert f"TORCH={torch.removesuffix('+cpu')}`" in DOCKERFILE
    assert "torch" not in stage("control")


def test_the_health_check_of_compose_is_readiness(simulated_planes: Planes) -> None:
    """The container's own command, asked of a control plane whose worker is there and then away."""
    kind, python, *arguments = SERVICES["control"]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    here = re.search(r":(\d+)/", simulated_planes.metrics_url)
    assert here is not None
    arguments = [word.replace(f":{ControlConfig().metrics_port}/", here[0]) for word in arguments]

    def code() -> int:
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    assert code() == 0
    simulated_planes.worker.stop()
    deadline = time.monotonic() + 60
    while code() == 0:
        assert time.monotonic() < deadline, "its worker is away"


def test_the_model_s_container_pulls_it() -> None:
    twinplane, command, *arguments = SERVICES["model"]["entrypoint"]
    assert (twinplane, command) == ("twinplane", "model")
    namespace = command_line().parse_args([*arguments, *as_given(SERVICES["model"]["command"])])
    assert (namespace.command, namespace.name) == ("pull", ControlConfig().model)


def test_the_ways_to_name_workers_exist() -> None:
    for setting in ("--worker", "--workers-dns"):
        assert f"`{setting}`" in README
        assert hasattr(ControlConfig(), setting[2:].replace("-", "_"))
    for command in re.findall(r"`(twinplane [^`]*)`", README):
        assert shlex.split(command)[1] in {"model", "control", "worker", "up"}
