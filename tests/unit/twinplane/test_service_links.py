"""What Kubernetes and Docker set is no setting; a mistyped setting still is an error. Paths."""

from __future__ import annotations

import argparse

import pytest

from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import Settings, SettingsError, resolve, variable
from twinplane.settings.service_links import is_service_link
from twinplane.settings.worker import WorkerConfig

SERVICES = (
    *("TWINPLANE", "TWINPLANE_WORKER", "TWINPLANE_CONTROL", "TWINPLANE_CONTROL_PLANE"),
    *("TWINPLANE_METRICS", "TWINPLANE_WORKER_0", "TWINPLANE_HOST", "TWINPLANE_SERVICE"),
    *("TWINPLANE_UDS", "TWINPLANE_MODEL", "TWINPLANE_PORT", "TWINPLANE_SIMULATE"),
)
HOSTS = ("10.96.0.7", "fd00:10:96::7", "twinplane.default.svc")


def links(service: str, host: str, number: int, protocol: str = "tcp") -> dict[str, str]:
    """The variables of one service, as a kubelet sets them, with one named port."""
    url = f"{protocol}://{f'[{host}]' if ':' in host else host}:{number}"
    port = f"{service}_PORT_{number}_{protocol.upper()}"
    return {
        f"{service}_SERVICE_HOST": host,
        f"{service}_SERVICE_PORT": str(number),
        f"{service}_SERVICE_PORT_GRPC": str(number),
        f"{service}_SERVICE_PORT_METRICS_2": str(number + 1),
        f"{service}_PORT": url,
        port: url,
        f"{port}_PROTO": protocol,
        f"{port}_PORT": str(number),
        f"{port}_ADDR": host,
    }


def settings(cls: type[Settings], table: str, environ: dict[str, str]) -> Settings:
    return resolve(cls, argparse.Namespace(), environ, None, table, known=known_settings())


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("service", SERVICES)
def test_the_links_of_a_service_change_nothing(service: str, host: str) -> None:
    environ = links(service, host, 50051) | links(service, host, 8125, "udp")
    assert settings(ControlConfig, "control", environ) == ControlConfig()
    assert settings(WorkerConfig, "worker", environ) == WorkerConfig()
    for name, value in environ.items():
        assert is_service_link(name, value), name


def test_a_setting_of_the_same_name_has_the_value_of_a_setting() -> None:
    environ = links("TWINPLANE", "10.96.0.7", 50051) | {"TWINPLANE_PORT": "50052"}
    assert settings(ControlConfig, "control", environ).port == 50052
    environ = links("TWINPLANE_METRICS", "10.96.0.7", 9400) | {"TWINPLANE_METRICS_PORT": "9401"}
    assert settings(ControlConfig, "control", environ).metrics_port == 9401


def test_a_link_leaves_the_setting_to_the_flag_or_the_file() -> None:
    flags = argparse.Namespace(port="50055")
    environ = links("TWINPLANE", "10.96.0.7", 50051)
    assert resolve(ControlConfig, flags, environ, None, "control", known=known_settings()).port == (
        50055
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TWINPLANE_WORKER_PORT", "50061"),  # no such setting, and no link's value
        ("TWINPLANE_CONTROL_PORT", "50051"),
        ("TWINPLANE_HOST_", "0.0.0.0"),
        ("TWINPLANE_PROT", "tcp://10.96.0.7:50051"),
        ("TWINPLANE_SERVICE_HOST", ""),
        ("TWINPLANE_SERVICE_HOST", "10.96.0.7:50051"),
        ("TWINPLANE_SERVICE_PORT", "70000"),
        ("TWINPLANE_SERVICE_PORTS", "50051"),
        ("TWINPLANE_PORT_50051", "tcp://10.96.0.7:50051"),
        ("TWINPLANE_PORT_50051_TCP", "10.96.0.7:50051"),
        ("TWINPLANE_PORT_50051_TCP_PROTO", "http"),
        ("TWINPLANE_PORT_50051_TCP_ADDR", "a b"),
        ("TWINPLANE_WORKER_PORT", "tcp://10.96.0.7"),
        ("TWINPLANE_WORKER_PORT", "http://10.96.0.7:50061"),
        ("TWINPLANE_WORKERS", "2"),
        ("TWINPLANE_", "x"),
        ("TWINPLANE_SERVED_MODEL", "x"),
    ],
)
def test_what_is_no_link_is_an_unknown_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown variable {name}"):
        settings(ControlConfig, "control", {name: value})


@pytest.mark.parametrize("value", ["tcp://10.96.0.7", "tcp://:50051", "tcp", "50051/tcp"])
def test_a_port_that_is_neither_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=r"TWINPLANE_PORT: .* is not a whole number"):
        settings(ControlConfig, "control", {"TWINPLANE_PORT": value})


def test_no_setting_is_taken_for_a_link() -> None:
    for names in known_settings().values():
        for name in names:
            for value in ("50051", "10.96.0.7", "tcp", "unix:/tmp/a", "true"):
                assert not is_service_link(variable(name), value)


HOME = "/home/of/somebody"


@pytest.mark.parametrize(
    ("cls", "table", "name", "given", "expected"),
    [
        (ControlConfig, "control", "model", "~/m", f"{HOME}/m"),
        (WorkerConfig, "worker", "model", "~/m/a b.gguf", f"{HOME}/m/a b.gguf"),
        (ControlConfig, "control", "uds", "~/c.sock", f"{HOME}/c.sock"),
        (WorkerConfig, "worker", "uds", "~/w.sock", f"{HOME}/w.sock"),
        (ControlConfig, "control", "worker", "unix:~/w.sock", f"unix:{HOME}/w.sock"),
        (ControlConfig, "control", "worker", "w~:50061", "w~:50061"),
        (ControlConfig, "control", "served_model_name", "~x", "~x"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_a_tilde_is_the_home_folder_wherever_a_path_is_set(
    cls: type[Settings],
    table: str,
    name: str,
    given: str,
    expected: str,
    source: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", HOME)
    flags = argparse.Namespace(**({name: given} if source == "flag" else {}))
    environ = {variable(name): given} if source == "variable" else {}
    file = None
    if source == "file":
        file = tmp_path_factory.mktemp("settings") / "a.toml"
        file.write_text(f'{name} = "{given}"\n')
    values = resolve(cls, flags, environ, file, table, known=known_settings())
    assert getattr(values, name) == expected


def test_a_tilde_without_a_home_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"TWINPLANE_MODEL: .*~nobody-at-all has no home"):
        settings(ControlConfig, "control", {"TWINPLANE_MODEL": "~nobody-at-all/m"})
