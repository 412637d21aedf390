"""The HTTP front end: routes, bodies and answers in OpenAI's shapes and our own, and the playground.

Every body becomes a message of the protocol and takes the same way as a gRPC call (`server.admission`).
"""
