"""Data that is not traffic: files of preferences, prompts and completions, and chats, with tokens made of
their text.
"""
