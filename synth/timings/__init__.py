"""The table of timings: its schema, its files, and what is remembered beside it."""
