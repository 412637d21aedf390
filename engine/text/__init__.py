"""Text at the engine's edge: the tokenizer's codec with stop strings, and structures compiled from their source.

The step itself sees token ids and the protocol `engine.types.GrammarState` only.
"""
