"""The prefill stage: computes prompts, samples output index 0, pushes KV."""
