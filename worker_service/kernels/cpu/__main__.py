"""Compiles the CPU kernels ahead of the first start: `python -m worker_service.kernels.cpu`.

Does nothing where they are there already. With --into-package they go into the package itself, for
a wheel of this platform. Ends with 1 and the reason where they cannot be compiled; a worker then
runs in torch.
"""

from __future__ import annotations

import argparse
import os
import sys

from worker_service.kernels.cpu.compiler import (
    KernelsUnavailable,
    default_cache,
    ensure_library,
    prebuild,
)


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_service.kernels.cpu")
    parser.add_argument("--into-package", action="store_true", help="for a wheel")
    arguments = parser.parse_args()
    try:
        if arguments.into_package:
            library = prebuild(os.environ)
        else:
            library = ensure_library(default_cache(os.environ), print, os.environ)
    except KernelsUnavailable as unavailable:
        print(f"no compiled CPU kernels: {unavailable}", file=sys.stderr)
        return 1
    print(f"CPU kernels: {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
