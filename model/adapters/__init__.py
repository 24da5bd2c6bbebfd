"""Low-rank adapters (LoRA) in the format of PEFT: read, checked against a model, and prepared for its executors."""
