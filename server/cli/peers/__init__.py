"""Names of flags, variables and settings of other servers (peers), and what Tessera answers to each.

`vllm.py`, `tgi.py`, `llama_cpp.py`, `sglang.py` and `ollama.py` are data; `docs/peer-names.md` is made from them.
Nothing here is imported before a name is met that is not Tessera's own, except `variables`.
"""
