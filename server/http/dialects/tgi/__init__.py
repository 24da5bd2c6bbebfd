"""The dialect of Hugging Face's Text Generation Inference (TGI)."""
