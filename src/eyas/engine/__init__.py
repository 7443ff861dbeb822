"""The engine: requests, scheduling, device state, the cycle, and the `LLM` facade."""
