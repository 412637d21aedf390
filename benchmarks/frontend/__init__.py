"""The server's front ends without a model behind them, to measure the cost of a streamed token alone."""
