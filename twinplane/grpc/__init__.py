"""What clients and servers of gRPC share: options and statuses. What servers share besides: health,
listening and interceptors."""
