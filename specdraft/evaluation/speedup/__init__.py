"""The speedup model: measured step times and rank accuracies, and the advice that follows from them."""
