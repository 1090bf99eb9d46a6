"""What FlashInfer asks of a tuning config; the only package that knows FlashInfer."""
