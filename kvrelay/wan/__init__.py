"""The WAN emulator: a TCP relay between two sites with rate, delay, jitter and outages. Knows nothing of LLMs."""
