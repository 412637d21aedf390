"""llama.cpp, called through its C interface (llama-cpp-python) by the loops of `llama_loop`.

Its own server would add overhead to what is measured here; the library does all the work.

    python -m benchmarks.peers.llama export MODEL OUT      a GGUF file, f16
    python -m benchmarks.peers.llama quantize FILE OUT q8_0|q4_0
    python -m benchmarks.peers.llama logits FILE OUT 5,17,3    float32 [tokens, vocabulary] of a text
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp as api

from benchmarks.peers.llama_loop import Llama, Model
from benchmarks.peers.worker import serve

_TYPES = {"q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0}


class LlamaCpp:
    """See `Library`."""

    api = api
    version = f"llama-cpp-python {api.__version__}"

    def tune(self, model_params: Any, context_params: Any) -> None:
        """Change nothing: the library is measured with its defaults."""

    def logits(self, context: Any) -> Any:
        """See `Library`."""
        return api.llama_get_logits(context)

    def forget(self, context: Any, sequence: int, start: int) -> None:
        """See `Library`."""
        api.llama_memory_seq_rm(api.llama_get_memory(context), sequence, start, -1)


def quantize(source: Path, out: Path, kind: str) -> None:
    """Quantise with llama.cpp's own rounding and its own mixture of types."""
    params = api.llama_model_quantize_default_params()
    params.ftype = _TYPES[kind]
    if api.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise OSError(f"llama.cpp cannot quantize {source}")


def logits(path: str, out: Path, tokens: list[int]) -> None:
    """Write the logits at every position of a text."""
    model = Model(LlamaCpp(), path, 1, 1, len(tokens))
    model.logits(tokens).tofile(out)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        from benchmarks.peers.gguf_export import export

        export(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "quantize":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "logits":
        logits(sys.argv[2], Path(sys.argv[3]), [int(token) for token in sys.argv[4].split(",")])
    else:
        serve(lambda settings: Llama(LlamaCpp(), settings))
