"""The only package that imports torch and FlashInfer, and only when a function of it is called."""
