"""The dialect of Anthropic's Messages API, with the options that all dialects of this service have."""
