"""Text: the tokenizer with stop strings, and the compilation of structures.

A step uses only token ids and the protocol `engine.types.GrammarState`.
"""
