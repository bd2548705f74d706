"""GPT, a decoder-only transformer language model.

shape.py   its sizes, and what it costs; without torch
module.py  the module
gpt2.py    its weights from and to Hugging Face's GPT-2
"""
