"""Pictures of measurements, from JSON files of the benchmark and the tests, or from a run of your own."""
