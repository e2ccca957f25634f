"""Model files of llama.cpp's format, read into transformers folders and written from them.

FILE.gguf ─► header.py ─► format.py, tokenizer.py ─► folder        (in)
folder    ─► writing.py, tokenizer.py ─► FILE.gguf                 (out)
"""
