"""What a server runs and where it keeps its configs."""
