"""Twinplane: LLM serving in two planes that talk a typed, versioned gRPC contract."""

__version__ = "0.1.0"
