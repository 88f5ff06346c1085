"""KV blocks between stages: `KvSender` pushes what `KvReceiver` lacks, over any `Carrier`. Imports nothing."""
