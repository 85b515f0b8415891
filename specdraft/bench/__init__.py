"""What a served drafter is worth: a real engine, real prompts, with and without drafting in turns."""
