"""The dialect of the OpenAI API, with the extensions of vLLM that its clients send."""
