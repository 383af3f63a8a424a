"""Triton kernels. Importing this package does not import triton; importing its modules does."""
