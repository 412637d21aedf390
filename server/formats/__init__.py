"""The formats of reasoning and tool calls: one module per format, selected by `detect`."""
