"""The flags that say how to reach a control plane, for every command that does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinplane.client.values import DEFAULT_ADDRESS
from twinplane.errors import TwinplaneError
from twinplane.settings.command_parser import complete_as_path

if TYPE_CHECKING:
    from twinplane import Client

ADDRESS_VARIABLE = "TWINPLANE_ADDRESS"


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a control plane is, and how to speak to it. Paths are of PEM files."""

    address: str = DEFAULT_ADDRESS
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_secure(self) -> bool:
        """Whether TLS is asked for."""
        return self.tls or any((self.tls_ca, self.tls_cert, self.tls_key))

    def client(self) -> Client:
        """A client for it. Raises InvalidAddress, and OSError for a file that can't be read."""
        from twinplane import Client, TlsCredentials

        files = (self.tls_ca, self.tls_key, self.tls_cert)
        credentials = TlsCredentials.from_files(*files) if self.is_secure else None
        return Client(self.address, credentials=credentials, metadata=self.metadata)


def add_connection_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the flags to `parser`; returns their group, for a command's own flag of the server."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address",
        default=os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS,
        help=f"reach the control plane at host:port or unix:PATH ({ADDRESS_VARIABLE};"
        f" default: {DEFAULT_ADDRESS})",
    )
    group.add_argument("--tls", action="store_true", help="encrypt, trusting this system's roots")
    for flag, text in (
        ("--tls-ca", "encrypt, trusting the certificates in FILE"),
        ("--tls-cert", "show the server the certificate in FILE; needs --tls-key"),
        ("--tls-key", "use the key in FILE for that certificate"),
    ):
        complete_as_path(group.add_argument(flag, metavar="FILE", help=text))
    group.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=TEXT",
        help="send this with every call, such as a bearer token (repeatable)",
    )
    return group


def connection(namespace: argparse.Namespace) -> Connection:
    """What the flags say. Raises TwinplaneError for flags that contradict each other."""
    if (namespace.tls_cert is None) is not (namespace.tls_key is None):
        raise TwinplaneError("--tls-cert and --tls-key go together")
    return Connection(
        namespace.address,
        namespace.tls,
        namespace.tls_ca,
        namespace.tls_cert,
        namespace.tls_key,
        dict(namespace.metadata),
    )


def _pair(argument: str) -> tuple[str, str]:
    from twinplane.client.arguments import metadata

    name, separator, text = argument.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("it is NAME=TEXT")
    try:
        metadata({name: text})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, text
