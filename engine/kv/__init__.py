"""Memory for keys and values: the arena of each model, its pages, and the ragged batch that addresses them.

Owns which pages are free, held or cached. Knows no model, no request's options and no step; the cursor that points
into this memory is `engine.types.KVCursor`.
"""
