"""The gRPC front end: its server, interceptors and services. Knows messages, but no engine."""
