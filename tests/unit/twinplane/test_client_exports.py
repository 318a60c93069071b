"""What `import twinplane` gives, and what it does not load."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import twinplane


def test_all_names_exist_and_are_listed() -> None:
    assert twinplane.__all__ == sorted(twinplane.__all__)
    for name in twinplane.__all__:
        assert getattr(twinplane, name) is not None
    assert set(twinplane.__all__) <= set(dir(twinplane))


def test_every_error_is_exported() -> None:
    from twinplane import errors

    public = {name for name in vars(errors) if inspect.isclass(getattr(errors, name))}
    public -= {"Mapping"}
    assert public <= set(twinplane.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = twinplane.no_such_name  # type: ignore[attr-defined]


def test_import_loads_neither_grpc_nor_protobuf() -> None:
    program = (
        "import sys, twinplane\n"
        "assert twinplane.__version__\n"
        "loaded = {'grpc', 'google.protobuf', 'asyncio', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "twinplane.Overloaded, twinplane.Message\n"
        "assert 'grpc' not in sys.modules\n"
        "twinplane.Client\n"
        "assert 'grpc' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_both_clients_offer_the_same() -> None:
    for blocking, asynchronous in (
        (twinplane.Client, twinplane.AsyncClient),
        (twinplane.Generation, twinplane.AsyncGeneration),
    ):
        methods = {name for name in vars(blocking) if not name.startswith("_")}
        assert methods == {name for name in vars(asynchronous) if not name.startswith("_")}
        for name in methods:
            parameters = inspect.signature(getattr(blocking, name)).parameters
            assert inspect.signature(getattr(asynchronous, name)).parameters == parameters


@pytest.mark.parametrize("client", [twinplane.Client, twinplane.AsyncClient])
def test_help_tells_every_option_of_a_generation(client: type) -> None:
    text = pydoc.plain(pydoc.render_doc(client.generate))  # type: ignore[attr-defined]
    for name in twinplane.GenerateOptions.__annotations__:
        assert re.search(rf"^ +{name}  +\w", text, re.MULTILINE), name
    assert "timeout" in text
