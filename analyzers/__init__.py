"""Pure functions from records and parameters to tables; one file is one command. Never torch, never hooks."""
