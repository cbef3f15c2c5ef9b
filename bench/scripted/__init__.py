"""Scripted engines as servers, and the conversations that agents have with them.

They stand in for SGLang and for OpenAI's API where a real engine would obscure what is measured
or tested.
"""
