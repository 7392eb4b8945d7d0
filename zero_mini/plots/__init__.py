"""Pictures of what was measured, drawn from the JSON files that the benchmark and the tests leave."""
