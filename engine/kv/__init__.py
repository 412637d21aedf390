"""Memory for keys and values: the arena of each model, its pages, and the ragged batch that addresses them.

This package tracks which pages are free, held or cached. The cursor into this memory is `engine.types.KVCursor`.
"""
