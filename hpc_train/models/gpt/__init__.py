"""GPT, a decoder-only transformer language model.

shape.py   its sizes and costs, without torch
module.py  the module
gpt2.py    converts weights: from and to Hugging Face's GPT-2, and from a GPT of other sizes
"""
