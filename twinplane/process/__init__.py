"""What a long-running process of either plane needs besides its work: logs, signals, a loop.

There is no gRPC and no protobuf here: code that must not know the wire writes logs, too.
"""
