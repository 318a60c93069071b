"""Where ranks meet, as the first one's address and its own words say it."""

from __future__ import annotations

import pytest

from control_plane.rpc.addresses import rendezvous_address
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.rpc.workers import worker_at
from control_plane.shell.rank_group import RankGroupWorker
from twinplane.settings.control import ControlConfig


@pytest.mark.parametrize(
    ("given", "worker", "address"),
    [
        (":29500", "gpu-0:50061", "gpu-0:29500"),
        (":29500", "10.0.0.7:50061", "10.0.0.7:29500"),
        (":29500", "[fd00::7]:50061", "[fd00::7]:29500"),
        (":29500", "dns:///gpu-0.ns:50061", "gpu-0.ns:29500"),
        (":29500", "dns://10.0.0.2/gpu-0.ns:50061", "gpu-0.ns:29500"),
        (":29500", "dns:gpu-0:50061", "gpu-0:29500"),
        (":29500", "ipv4:10.0.0.7:50061", "10.0.0.7:29500"),
        (":29500", "ipv6:[fd00::7]:50061", "[fd00::7]:29500"),
        (":29500", "unix:/run/worker.sock", "127.0.0.1:29500"),
        (":29500", "unix:worker:7.sock", "127.0.0.1:29500"),
        ("own:29500", "gpu-0:50061", "own:29500"),
        ("[fd00::9]:29500", "unix:/run/worker.sock", "[fd00::9]:29500"),
        ("", "gpu-0:50061", ""),
    ],
)
def test_an_open_host_is_the_one_we_reach(given: str, worker: str, address: str) -> None:
    assert rendezvous_address(given, worker) == address


def test_one_address_is_a_worker_and_several_are_ranks() -> None:
    assert isinstance(worker_at("a:1", controller_id="c"), GrpcWorker)
    assert isinstance(worker_at("a:1,b:1", controller_id="c"), RankGroupWorker)


@pytest.mark.parametrize("worker", ["a:1,b:1", "unix:/a,unix:/b", "a:1,unix:/b,c:2,d:3"])
def test_several_addresses_are_taken(worker: str) -> None:
    assert ControlConfig(worker=worker).worker == worker


@pytest.mark.parametrize(
    "worker",
    [
        "a:1,",
        ",a:1",
        "a:1,,b:1",
        "a:1,b",
        "a:1,b:1,a:1",
        "a:1, b:x",
        "",
        " ",
        "a:1 a:1",
        "a:1,b:1 b:1",
    ],
)
def test_addresses_that_are_none_are_refused(worker: str) -> None:
    with pytest.raises(ValueError, match="worker"):
        ControlConfig(worker=worker)


def test_replicas_are_apart_by_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = ControlConfig(worker=" a:1,b:1   unix:~/c,d:1 e:1\n")
    assert config.replicas == ("a:1,b:1", "unix:/home/me/c,d:1", "e:1")


def test_a_home_folder_is_found_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert ControlConfig(worker="unix:~/a,unix:~/b").worker == "unix:/home/me/a,unix:/home/me/b"
