"""What exists, as data with typed access: models and shapes, devices, tactics."""
