"""The HTTP front end: routes, bodies and answers in OpenAI's formats and our own, and the playground.

Every body is converted to a message of the protocol and then admitted like a gRPC call (`server.admission`).
"""
