"""Live torch: builds models on meta, runs them and records what they did. The only folder that imports torch."""
