"""What a long-running process of either plane needs besides its work: logs, signals, a loop.

No gRPC and no protobuf here: also what must not know the wire logs.
"""
