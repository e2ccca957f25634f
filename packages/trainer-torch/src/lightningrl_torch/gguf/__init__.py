"""Model files of llama.cpp's format, read into transformers folders and written from them.

FILE.gguf ─► header.py ─► config.py, weights.py, tokenizer.py ─► folder        (in)
folder    ─► writing.py, vocabulary.py ─► FILE.gguf                            (out)
"""
