"""What people see of a run: progress, curves, samples, the summary at its end."""
