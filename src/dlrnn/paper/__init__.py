"""What exists only because of the paper: its numbers, the recipes, the results."""
