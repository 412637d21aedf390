"""What a machine without a GPU can tell of one with: what kernels are compiled to, and what engines would wait for."""
