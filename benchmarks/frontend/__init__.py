"""The server's doors without a model behind them: what a streamed token costs by itself."""
