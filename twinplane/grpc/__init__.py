"""What everything that speaks gRPC shares: options and statuses; of the servers also health,
listening and interceptors."""
