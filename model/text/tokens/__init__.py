"""What the files of a tokenizer say of special tokens, and which tokens end a generation."""
