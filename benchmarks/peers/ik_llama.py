"""ik_llama.cpp, a fork of llama.cpp for CPUs, called through its C interface by the loops of `llama_loop`.

It reads the files that llama.cpp has quantised, so both programs have the same weights.
"""

from __future__ import annotations

import ctypes
from importlib import metadata
from typing import Any

import ik_llama_cpp._ctypes_api as api

from benchmarks.peers.llama_loop import Llama
from benchmarks.peers.worker import serve


def _bound(name: str, result: Any, *arguments: Any) -> Any:
    """Bind a function of the library that its Python package does not expose."""
    function = getattr(api._lib, name)  # noqa: SLF001 - it has no other name
    function.restype, function.argtypes = result, list(arguments)
    return function


class IkLlamaCpp:
    """See `Library`. With `repack`, weight rows are interleaved at load, as its authors advise for CPUs."""

    api = api
    version = f"ik-llama-cpp-python {metadata.version('ik-llama-cpp-python')}"

    def __init__(self, *, repack: bool) -> None:
        self._repack = repack
        self._get_logits = _bound("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
        position = ctypes.c_int32
        self._remove = _bound(
            "llama_kv_cache_seq_rm", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32, position, position
        )

    def tune(self, model_params: Any, context_params: Any) -> None:
        """Disable memory mapping if rows are interleaved, because interleaved rows cannot be mapped from the file."""
        model_params.repack_tensors, model_params.use_mmap = self._repack, not self._repack

    def logits(self, context: Any) -> Any:
        """See `Library`."""
        return self._get_logits(context)

    def forget(self, context: Any, sequence: int, start: int) -> None:
        """See `Library`."""
        self._remove(context, sequence, start, -1)


if __name__ == "__main__":
    serve(lambda settings: Llama(IkLlamaCpp(repack=settings["how"] == "repack"), settings))
