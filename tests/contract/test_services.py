"""Every RPC of the contract is served: a servicer's inherited method answers UNIMPLEMENTED."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from control_plane.rpc.control_servicer import ControlServicer
from control_plane.rpc.inference_servicer import InferenceServicer
from twinplane.control.v1 import control_pb2
from twinplane.inference.v1 import inference_pb2
from twinplane.worker.v1 import model_runner_pb2
from worker_service.rpc.servicer import ModelRunnerServicer

SERVICERS = (
    (inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], InferenceServicer),
    (control_pb2.DESCRIPTOR.services_by_name["ControlService"], ControlServicer),
    (model_runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"], ModelRunnerServicer),
)


@pytest.mark.parametrize(("service", "servicer"), SERVICERS)
def test_every_rpc_has_its_method(service: ServiceDescriptor, servicer: type) -> None:
    own = [vars(kind) for kind in servicer.mro() if not kind.__name__.endswith("ServiceServicer")]
    missing = [
        method.name
        for method in service.methods
        if not any(method.name in methods for methods in own)
    ]
    assert not missing
