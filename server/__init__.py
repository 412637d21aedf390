"""The server around the engine: network, text, deadlines and cancellation. Contains no tensor code."""
