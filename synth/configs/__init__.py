"""One config: read once from any of its forms, written, and turned into another config."""
