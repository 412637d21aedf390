"""The HTTP front end: routes, bodies and responses in the formats of OpenAI, Anthropic and our own, and the playground.

Every body becomes a `Request` of the engine and is then admitted like a gRPC call (`server.admission`).
"""
