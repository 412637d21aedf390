"""One model: its checkpoint, its weights in the configured format, and passes over ragged batches.

This package contains loading, rounding, rotary tables and the runner that turns token ids into logits. `linear`
contains the matrices, `decoder` the models.
"""
