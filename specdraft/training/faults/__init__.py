"""What is done about losses that are no numbers and ranks that are gone."""
