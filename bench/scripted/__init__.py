"""Engines that a script answers for, as servers, and the conversations that agents have with them.

They stand in for SGLang and for OpenAI's API where a real engine would hide what is measured, or tested.
"""
