"""Pictures of what was measured, from JSON files that the benchmark and the tests leave, or from a run of your own."""
