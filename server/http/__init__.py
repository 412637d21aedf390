"""The HTTP front end: routes, bodies and answers in OpenAI's formats and our own, and the playground.

Every body becomes a `Request` of the engine and is then admitted like a gRPC call (`server.admission`).
"""
