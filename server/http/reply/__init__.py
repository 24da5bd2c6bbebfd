"""Text on its way to the client: detokenization, replies, streams."""
