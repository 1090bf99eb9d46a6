"""Offline synthesizer of FlashInfer MoE tuning configs."""

__version__ = "0.1.0"
