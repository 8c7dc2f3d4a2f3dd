"""What several ranks agree on: outcomes, step plans, and rows that attention exchanges."""
