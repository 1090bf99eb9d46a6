"""What the studies in this folder share: replayed sweeps, public measurements, plots, and how a script is run."""
