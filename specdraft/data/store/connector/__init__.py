"""What vLLM's process imports, by a PYTHONPATH that holds this folder and nothing else of specdraft."""
