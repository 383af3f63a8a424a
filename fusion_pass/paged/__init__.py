"""Decode attention over a paged KV cache: its operators, launches, reference and checks."""
