"""The text for calibration before the first request: code and prose, like the text that callers send. It is our own."""

from pathlib import Path

TEXT = (Path(__file__).parents[1] / "types.py").read_text("utf-8")[:9000]
