"""GPT, a decoder-only transformer language model.

shape.py   its sizes and costs, without torch
module.py  the module
gpt2.py    converts its weights from and to Hugging Face's GPT-2
"""
