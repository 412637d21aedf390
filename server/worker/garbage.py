"""What Python's garbage collector need not look at. Knows nothing of what it is."""

from __future__ import annotations

import atexit
import gc


def freeze_loaded() -> None:
    """Leave all that is there now out of later collections: models and libraries stay until the process ends.

    Every token makes a few objects, and those of many streams live long enough to bring on full collections; each
    would walk through some hundred thousand objects of torch and transformers (docs/benchmarks/frontend.md).
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries want their objects back in the end
