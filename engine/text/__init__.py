"""Text at the border of the engine: the tokenizer's codec with stop strings, and structures compiled from their source.

A step uses only token ids and the protocol `engine.types.GrammarState`.
"""
