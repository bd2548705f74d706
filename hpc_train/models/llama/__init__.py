"""Llama and its relatives Mistral, Qwen2 and Qwen3: decoder-only transformer language models.

shape.py         their sizes and costs, without torch
module.py        the module of all four
rotary.py        positions as rotations of queries and keys
hugging_face.py  converts weights: from and to Hugging Face's models of the same names
"""
