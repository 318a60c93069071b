"""Every sampling parameter of the contract can be asked for in Python and on the command line."""

from __future__ import annotations

import argparse

from twinplane.cli.request_flags import add_request_flags
from twinplane.client.options import GenerateOptions
from twinplane.common.v1 import types_pb2

PARAMETERS = {field.name for field in types_pb2.SamplingParameters.DESCRIPTOR.fields}


def test_every_parameter_is_an_option_with_a_word_about_it() -> None:
    assert GenerateOptions.__optional_keys__ >= PARAMETERS
    lines = (GenerateOptions.__doc__ or "").splitlines()
    assert {line.split()[0] for line in lines if line.strip()} >= PARAMETERS


def test_every_parameter_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_request_flags(parser, max_tokens=1)
    assert vars(parser.parse_args([])).keys() >= PARAMETERS
