"""The gRPC front end: server, interceptor and services. Independent of the engine."""
