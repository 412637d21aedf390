"""One model: its checkpoint, its weights in the type or the bits asked for, and passes over ragged batches.

Owns loading, rounding, rotary tables and the runner that turns token ids into logits. `linear` holds the matrices,
`fusion` the faster replacements of modules. Knows no request, no scheduler and no sampling.
"""
