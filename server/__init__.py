"""Time, network, text and cancellation around the engine. Knows no tensors."""
