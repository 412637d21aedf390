"""Exclusion of loaded objects from Python's garbage collection."""

from __future__ import annotations

import atexit
import gc


def freeze_loaded() -> None:
    """Exclude all existing objects from later collections: models and libraries stay until the process ends.

    Every token creates a few objects. With many streams they live long enough to cause full collections, and each full
    collection would visit some hundred thousand objects of torch and transformers (docs/benchmarks/frontend.md).
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # so that libraries can clean up their objects at exit
