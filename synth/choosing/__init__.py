"""Which tactic, and what to time next."""
