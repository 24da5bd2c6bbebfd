"""Calls of tools: the formats that models write them in, their grammars and their parser. Imports no PyTorch."""
