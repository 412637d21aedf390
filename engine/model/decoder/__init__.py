"""What a model computes, as data, and the decoder that runs every such model. Imports no transformers."""
