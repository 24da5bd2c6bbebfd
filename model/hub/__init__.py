"""From the name of a model to its folder: what people type, the Hugging Face Hub and its cache. Imports no PyTorch."""
