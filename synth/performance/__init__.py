"""How long a tactic takes: geometry under random routing, the analytic model, the fitted model, evaluation."""
