"""What the gRPC servers of both planes share: where they listen, their health, their options."""
